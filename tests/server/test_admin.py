"""Health, readiness, what is served, cache, aborts and the tokenizer by hand."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest

from cardan.engine.api import GenerateRequest
from cardan.errors import EngineBusyError


def test_health_and_ready(client: httpx.Client) -> None:
    for path in ("/health", "/health_generate", "/ready"):
        response = client.get(path)
        assert response.status_code == 200
        assert response.json() == {"status": "ok"}


def test_a_probe_of_an_engine_that_does_not_answer_has_an_end(start_fake: Any, monkeypatch: Any) -> None:
    server = start_fake()
    server.app.state.probe_timeout_s = 0.2

    async def never() -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(server.engine, "stats", never)
    response = server.http.get("/health_generate", timeout=5)
    assert response.status_code == 503
    assert response.json() == {"status": "no answer in time"}


def test_health_generates_nothing(start_fake: Any) -> None:
    server = start_fake()
    server.http.get("/health")
    server.http.get("/ready")
    assert server.engine.seen == []
    server.http.get("/health_generate")
    assert server.engine.seen[0].sampling.max_new_tokens == 1


def test_dead_engine(start_fake: Any) -> None:
    server = start_fake()
    server.engine.alive = False
    for path in ("/health", "/ready", "/metrics"):
        assert server.http.get(path).status_code == 503
    response = server.http.post("/generate", json={"text": "x"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_dead"
    assert "exit code 9" in response.json()["error"]["message"]


def test_an_engine_that_does_not_answer_in_time(start_fake: Any, monkeypatch: Any) -> None:
    server = start_fake()

    async def busy() -> Any:
        raise EngineBusyError("The scheduler has not answered for 10 s.", retry_after_s=4.2)

    monkeypatch.setattr(server.engine, "stats", busy)
    monkeypatch.setattr(server.engine, "flush_cache", busy)
    for path in ("/server_info", "/flush_cache"):
        response = server.http.get(path)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
        assert response.json()["error"]["code"] == "engine_busy"
        assert "has not answered" in response.json()["error"]["message"]
    assert server.http.get("/health_generate").json() == {"status": "no answer in time"}


def test_full_queue(start_fake: Any) -> None:
    server = start_fake()
    server.engine.full = True
    for path, body in (("/generate", {"text": "x"}), ("/v1/completions", {"prompt": "x", "stream": True})):
        response = server.http.post(path, json=body)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "3"
        assert response.json()["error"]["code"] == "queue_full"


def test_probe_that_times_out_leaves_nothing(start_fake: Any) -> None:
    server = start_fake()
    server.engine.hang = True
    server.app.state.probe_timeout_s = 0.2
    response = server.http.get("/health_generate")
    assert response.status_code == 503
    assert response.json() == {"status": "no token in time"}
    server.engine.hang = False
    server.engine.full = False
    server.wait_idle()


def test_busy_engine_that_makes_progress_is_healthy(start_fake: Any) -> None:
    server = start_fake()
    server.engine.hang = True
    server.app.state.probe_timeout_s = 0.3

    async def others() -> None:
        await asyncio.sleep(0.1)
        server.engine.totals["generated_tokens"] += 5

    asyncio.run_coroutine_threadsafe(others(), server.loop)
    response = server.http.get("/health_generate")
    assert response.status_code == 200
    assert response.json() == {"status": "busy", "generated_tokens": 5}


def test_draining_server(start_fake: Any) -> None:
    server = start_fake()
    server.app.state.server.draining = True
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ready").json() == {"status": "shutting down"}
    for path in ("/generate", "/v1/chat/completions", "/v1/completions"):
        response = server.http.post(path, json={})
        assert response.status_code == 503
        assert "shutting down" in response.json()["error"]["message"]
        assert response.headers["retry-after"]
    assert server.http.get("/health_generate").status_code == 503


def test_server_info(client: httpx.Client) -> None:
    info = client.get("/server_info").json()
    assert info["model_name"] == client.get("/v1/models").json()["data"][0]["id"]
    assert info["config"]["server"]["port"] == 0
    assert info["stats"]["max_total_tokens"] > 0
    assert "plan" in info
    assert client.get("/get_server_info").json().keys() == info.keys()


def test_model_info(client: httpx.Client) -> None:
    info = client.get("/get_model_info").json()
    assert info == client.get("/model_info").json()
    assert info["is_generation"] is True
    assert info["context_length"] > info["max_input_tokens"] > 0


def test_models(client: httpx.Client) -> None:
    models = client.get("/v1/models").json()
    assert models["object"] == "list"
    model = models["data"][0]
    assert model["object"] == "model"
    assert client.get(f"/v1/models/{model['id']}").json() == model


def test_flush_cache(client: httpx.Client) -> None:
    body = {"text": "a text that is cached and then is not", "sampling_params": {"max_new_tokens": 1}}
    client.post("/generate", json=body)
    assert client.post("/generate", json=body).json()["meta_info"]["cached_tokens"] > 0
    assert client.post("/flush_cache").json()["success"] is True
    assert client.post("/generate", json=body).json()["meta_info"]["cached_tokens"] == 0
    assert client.get("/flush_cache").status_code == 200


def test_flush_while_running(start_fake: Any) -> None:
    server = start_fake()
    server.engine.hang = True
    with Background(server, rid="runs"):
        response = server.http.post("/flush_cache")
        assert response.status_code == 400
        assert "requests are running" in response.json()["error"]["message"]
        server.engine.hang = False


class Background:
    """A request in a thread; its answer is kept."""

    def __init__(self, server: Any, path: str = "/generate", **body: Any) -> None:
        self._server = server
        self._path = path
        self._body = {"text": "x", **body} if path == "/generate" else body
        self._thread = threading.Thread(target=self._run)
        self.response: httpx.Response | None = None

    def _run(self) -> None:
        with self._server.client() as client:
            self.response = client.post(self._path, json=self._body)

    def __enter__(self) -> Background:
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.engine.open and time.monotonic() < deadline:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("how", [{"rid": "mine"}, {"abort_all": True}])
def test_abort_request(start_fake: Any, how: dict[str, Any]) -> None:
    server = start_fake()
    server.engine.hang = True
    with Background(server, rid="mine") as running:
        assert server.http.post("/abort_request", json={"rid": "another"}).status_code == 200
        assert server.engine.open
        assert server.http.post("/abort_request", json=how).json() == {"success": True}
    assert running.response is not None
    assert running.response.json()["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted."}
    server.wait_idle()


def test_abort_by_the_id_of_several_prompts(start_fake: Any) -> None:
    server = start_fake()
    server.engine.hang = True
    with Background(server, "/v1/completions", prompt=["a", "b"], rid="both") as running:
        deadline = time.monotonic() + 5
        while len(server.engine.open) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        server.http.post("/abort_request", json={"rid": "both"})
    assert running.response is not None
    assert [choice["finish_reason"] for choice in running.response.json()["choices"]] == ["abort", "abort"]


def test_id_in_use(start_fake: Any) -> None:
    server = start_fake()
    server.engine.hang = True
    with Background(server, rid="mine"):
        for stream in (False, True):
            response = server.http.post("/generate", json={"text": "y", "rid": "mine", "stream": stream})
            assert response.status_code == 400
            assert "in use by an open request" in response.json()["error"]["message"]
        server.engine.hang = False
    server.wait_idle()


@pytest.mark.parametrize("body", [{}, {"rid": "x", "abort_all": True}, {"rid": ""}])
def test_abort_needs_one_of_both(client: httpx.Client, body: dict[str, Any]) -> None:
    response = client.post("/abort_request", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "Send either 'rid' or \"abort_all\": true."


def test_tokenize_and_back(client: httpx.Client) -> None:
    text = "Grüße, 世界! 🙂"
    encoded = client.post("/tokenize", json={"text": text}).json()
    assert encoded["count"] == len(encoded["tokens"])
    assert encoded["max_model_len"] > 0
    assert client.post("/tokenize", json={"prompt": text}).json() == encoded
    assert client.post("/detokenize", json={"tokens": encoded["tokens"]}).json() == {"text": text, "prompt": text}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"text": "", "prompt": ""}
    long = client.post("/tokenize", json={"text": "ab " * 5000, "add_special_tokens": False}).json()
    assert long["count"] >= 5000


def test_a_client_that_tokenizes_here_learns_where_texts_end(client: httpx.Client, server: Any) -> None:
    """As lm-evaluation-harness does, which encodes what it is told ends a text."""
    info = client.get("/tokenizer_info").json()
    tokenizer = server.engine.tokenizer
    assert info["vocab_size"] == tokenizer.vocab_size
    (end,) = client.post("/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False}).json()["tokens"]
    assert end in tokenizer.eos_ids
    assert info["bos_token"] is None or tokenizer.token_id(info["bos_token"]) == tokenizer.bos_id
    assert info["chat_template"] == tokenizer.chat_templates.get("default")


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/tokenize", {}, 400, "exactly one"),
        ("/tokenize", {"text": "a", "prompt": "b"}, 400, "exactly one"),
        ("/tokenize", {"text": ["a"]}, 400, "valid string"),
        ("/tokenize", {"text": "a", "model": "other"}, 404, "does not exist here"),
        ("/detokenize", {}, 400, "is required"),
        ("/detokenize", {"tokens": ["a"]}, 400, "list of token ids"),
        ("/detokenize", {"tokens": [10**12]}, 400, "ids of this model"),
        ("/detokenize", {"tokens": [-1]}, 400, "ids of this model"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "does not exist here"),
    ],
)
def test_bad_tokenizer_requests(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


def test_requests_are_logged_without_their_text(start_fake: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="cardan.server")
    server = start_fake(log_requests=True)
    server.http.post("/generate", json={"text": "a secret", "rid": "r1", "sampling_params": {"max_new_tokens": 3}})
    assert "request r1 choice 0: length, prompt 8, cached 0, output 3 tokens" in caplog.text
    assert "secret" not in caplog.text


def test_unexpected_errors_are_logged_and_not_told(start_fake: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = start_fake()

    def fail(_: GenerateRequest) -> Any:
        raise ZeroDivisionError("inner detail")

    server.engine.generate = fail
    response = server.http.post("/generate", json={"text": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "inner detail" not in response.text
    assert "inner detail" in caplog.text
