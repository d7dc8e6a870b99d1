"""Requests that are aborted, or whose clients leave, before they have reached the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from server_fakes import ServerThread
from test_disconnect import send

from cardan.engine.api import GenerateOutput, GenerateRequest
from cardan.errors import RequestError
from cardan.server.chats.unenforced import name_unenforced
from cardan.server.http.disconnects import while_connected
from cardan.server.openai.responses import routes as responses
from cardan.server.serve import finish_open_requests
from cardan.server.state import ServerState
from cardan.types import FinishKind, FinishReason

LONG = "x" * 5000
"""Conversations of this length are rendered and tokenized beside the event loop."""

CHAT = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": {"model": "tiny", **CHAT},
    "/v1/responses": {"input": LONG, "max_output_tokens": 4},
    "/api/chat": {"model": "tiny", "messages": CHAT["messages"], "options": {"num_predict": 4}},
    "/api/generate": {"model": "tiny", "prompt": LONG, "raw": True, "options": {"num_predict": 4}},
}


class Held:
    """A function of the tokenizer that waits until the test lets it go on."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.reached = threading.Event()
        self.released = threading.Event()

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.reached.set()
        assert self.released.wait(30), "the test never let it go on"
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


Hold = Callable[..., Held]
Post = Callable[..., "Future[httpx.Response]"]


@pytest.fixture
def hold(server: ServerThread, monkeypatch: pytest.MonkeyPatch, post: Post) -> Iterator[Hold]:
    """Holds rendering or tokenizing of the shared server; lets it go on before ``post`` waits for its answers."""
    held: list[Held] = []

    def start(name: str = "render_chat", result: Any = "Hello") -> Held:
        held.append(Held(result))
        monkeypatch.setattr(server.engine.tokenizer, name, held[-1])
        return held[-1]

    yield start
    for one in held:
        one.released.set()


@pytest.fixture
def state(server: ServerThread) -> ServerState:
    """The shared server's state."""
    state: ServerState = server.app.state.server
    return state


@pytest.fixture
def post(server: ServerThread) -> Iterator[Post]:
    """Sends a body from another thread."""
    with ThreadPoolExecutor(4) as threads, server.client() as client:
        yield lambda path, body: threads.submit(client.post, path, json=body)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.005)


def num_started(server: ServerThread) -> int:
    """How many requests the engine has taken so far."""
    return int(server.stats()["totals"].get("requests", 0))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_an_aborted_request_never_starts(
    server: ServerThread, hold: Hold, post: Post, state: ServerState, path: str, stream: bool
) -> None:
    before = num_started(server)
    held = hold("encode", [1, 2, 3]) if path == "/api/generate" else hold()
    answer = post(path, {**BODIES[path], "stream": stream})
    assert held.reached.wait(30)
    assert server.stats()["open_requests"] == 1
    assert server.http.post("/abort_request", json={"abort_all": True}).json() == {"success": True}
    held.released.set()
    response = answer.result(30)
    if path == "/v1/chat/completions":
        assert response.status_code == 200
        data = response.json() if not stream else json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))
        assert [choice["finish_reason"] for choice in data["choices"]] == ["abort"]
    else:
        assert response.status_code == 503, response.text
        assert "The request was aborted before its answer was complete." in response.text
    server.wait_idle()
    assert num_started(server) == before
    assert not state.live


def test_an_id_is_known_before_the_request_starts(
    server: ServerThread, hold: Hold, post: Post, state: ServerState
) -> None:
    before = num_started(server)
    held = hold()
    first, other = (
        post("/v1/chat/completions", {**CHAT, "ignore_eos": True, "rid": rid, "n": 2}) for rid in ("first", "other")
    )
    assert held.reached.wait(30)
    wait_until(lambda: len(state.live) == 2)
    again = server.http.post("/v1/chat/completions", json={**CHAT, "rid": "first"})
    assert again.status_code == 400
    assert again.json()["error"]["code"] == "duplicate_rid"
    native = server.http.post("/generate", json={"text": "x", "rid": "first"})
    assert native.json()["error"]["code"] == "duplicate_rid"
    server.http.post("/abort_request", json={"rid": "first"})
    held.released.set()
    aborted = first.result(30).json()
    assert [choice["finish_reason"] for choice in aborted["choices"]] == ["abort", "abort"]
    assert aborted["usage"]["completion_tokens"] == 0
    assert aborted["usage"]["prompt_tokens"] == other.result(30).json()["usage"]["prompt_tokens"]
    assert [choice["finish_reason"] for choice in other.result().json()["choices"]] == ["length", "length"]
    server.wait_idle()
    assert num_started(server) > before
    assert not state.live


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_starts_nothing(server: ServerThread, hold: Hold, state: ServerState, path: str) -> None:
    before = num_started(server)
    held = hold("encode", [1, 2, 3]) if path == "/api/generate" else hold()
    sock = send(server, path, BODIES[path])
    assert held.reached.wait(30)
    assert len(state.live) == 1
    sock.close()
    server.wait_idle()  # although what was begun in a thread is still held
    assert not state.live
    held.released.set()
    assert server.http.post(path, json=BODIES[path]).status_code == 200  # by then what was held has gone on
    server.wait_idle()
    assert num_started(server) == before + 1


@pytest.mark.parametrize("path", list(BODIES)[:4])
def test_nothing_is_left_of_what_cannot_be_prepared(
    server: ServerThread, hold: Hold, post: Post, state: ServerState, path: str
) -> None:
    held = hold(result=RequestError("The template refuses this."))
    answer = post(path, BODIES[path])
    assert held.reached.wait(30)
    server.http.post("/abort_request", json={"abort_all": True})
    held.released.set()
    assert answer.result(30).status_code == 400
    assert "The template refuses this." in answer.result().text
    server.wait_idle()
    assert not state.live


def test_a_background_response_that_is_aborted_is_cancelled(server: ServerThread, hold: Hold, post: Post) -> None:
    before = num_started(server)
    held = hold()
    answer = post("/v1/responses", {**BODIES["/v1/responses"], "background": True})
    assert held.reached.wait(30)
    server.http.post("/abort_request", json={"abort_all": True})
    held.released.set()
    begun = answer.result(30).json()
    ended = server.http.post(f"/v1/responses/{begun['id']}/cancel").json()
    assert ended["status"] == "cancelled"
    assert num_started(server) == before


def test_what_is_prepared_is_aborted_after_the_drain_time(
    server: ServerThread, hold: Hold, post: Post, state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = num_started(server)
    held = hold()
    answer = post("/v1/chat/completions", CHAT)
    assert held.reached.wait(30)
    (live,) = state.live.values()
    at_once = dataclasses.replace(state.config.server, drain_timeout_s=0.0)
    monkeypatch.setattr(state, "config", dataclasses.replace(state.config, server=at_once))
    draining = asyncio.run_coroutine_threadsafe(finish_open_requests(state), server.loop)
    wait_until(lambda: bool(live.aborted))
    held.released.set()
    assert answer.result(30).json()["choices"][0]["finish_reason"] == "abort"
    draining.result(30)
    assert num_started(server) == before


def test_a_shutdown_waits_for_what_is_prepared(
    server: ServerThread, hold: Hold, post: Post, state: ServerState
) -> None:
    held = hold()
    answer = post("/v1/chat/completions", CHAT)
    assert held.reached.wait(30)
    assert server.call(state.wait_until_idle(0.01)) is False
    held.released.set()
    assert answer.result(30).status_code == 200
    assert server.call(state.wait_until_idle(30)) is True


LATE: dict[str, tuple[str, dict[str, Any]]] = {
    "/generate": ("native.generate", {"text": "x"}),
    "/v1/completions": ("openai.completions", {"prompt": ["x", "y"], "max_tokens": 4}),
    "/v1/score": ("openai.scoring", {"query": "x", "items": ["a", "b"], "label_token_ids": [65, 66]}),
    "/v1/embeddings": ("openai.embeddings", {"input": ["x", "y"]}),
    "/api/embed": ("openai.embeddings", {"model": "tiny", "input": "x"}),
}
"""Routes that tell the engine at once, where they run, and a body."""


@pytest.fixture
def abort_late(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has what a module of the server runs be aborted right before."""

    def start(module: str, rid: str | None = None) -> None:
        async def run(request: Any, work: Coroutine[Any, Any, Any]) -> Any:
            await state.abort(rid)
            return await while_connected(request, work)

        monkeypatch.setattr(f"cardan.server.{module}.while_connected", run)

    return start


@pytest.mark.parametrize("path", LATE)
def test_an_abort_right_before_the_engine_is_told(
    server: ServerThread, state: ServerState, abort_late: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    module, body = LATE[path]
    before = num_started(server)
    if "embed" in path:
        model = dataclasses.replace(state.config.model, is_embedding=True)
        monkeypatch.setattr(state, "config", dataclasses.replace(state.config, model=model))
    abort_late(module)
    response = server.http.post(path, json=body)
    if path == "/generate":
        assert response.json()["meta_info"]["finish_reason"]["type"] == "abort"
    elif path == "/v1/completions":
        assert [choice["finish_reason"] for choice in response.json()["choices"]] == ["abort", "abort"]
    else:
        assert response.status_code == 503, response.text
        assert "The request was aborted before its answer was complete." in response.text
    assert num_started(server) == before
    assert not state.live


def test_an_abort_of_one_prompt_of_several(server: ServerThread, abort_late: Any) -> None:
    before = num_started(server)
    abort_late("native.generate", "b")
    sampling = {"max_new_tokens": 2, "ignore_eos": True}
    answers = server.http.post(
        "/generate", json={"text": ["x", "y"], "rid": ["a", "b"], "sampling_params": sampling}
    ).json()
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["length", "abort"]
    assert num_started(server) == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_that_is_aborted_says_so(server: ServerThread, abort_late: Any, stream: bool) -> None:
    abort_late("http.sse" if stream else "openai.completions")
    body = {"prompt": "x", "max_tokens": 0, "echo": True, "stream": stream}
    response = server.http.post("/v1/completions", json=body)
    data = response.json() if not stream else json.loads(response.text.split("\n\n")[0].removeprefix("data: "))
    assert [(choice["text"], choice["finish_reason"]) for choice in data["choices"]] == [("x", "abort")]


def test_a_probe_that_is_aborted_is_no_success(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        yield GenerateOutput(rid="", finish_reason=FinishReason(FinishKind.ABORT))

    monkeypatch.setattr(server.engine, "generate", generate)
    response = server.http.get("/health_generate")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "aborted")


def test_a_background_response_is_known_before_it_runs(
    server: ServerThread, state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def count(*args: Any) -> Any:
        seen.append(state.num_open)
        return name_unenforced(*args)

    monkeypatch.setattr(responses, "name_unenforced", count)
    body = {"input": "x", "max_output_tokens": 4, "background": True}
    begun = server.http.post("/v1/responses", json=body).json()
    assert (begun["status"], seen) == ("queued", [1])
    server.wait_idle()
    assert server.http.get(f"/v1/responses/{begun['id']}").json()["status"] in ("completed", "incomplete")
    assert not state.live
