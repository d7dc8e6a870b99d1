"""What an owner asks of a running server: load, logging, garbage collection; and no local path for its clients."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest


def test_loads(start_fake: Any) -> None:
    server = start_fake()
    (idle,) = server.http.get("/v1/loads").json()["loads"]
    assert (idle["worker"], idle["num_running_reqs"], idle["token_usage"]) == (0, 0, 0)
    server.engine.delay_s = 0.02
    asking = threading.Thread(
        target=server.http.post,
        args=("/generate",),
        kwargs={"json": {"text": "x", "sampling_params": {"max_new_tokens": 20}}},
    )
    asking.start()
    deadline = time.monotonic() + 10
    while not (busy := server.http.get("/v1/loads").json())["open_requests"]:
        assert time.monotonic() < deadline
    asking.join()
    assert busy["open_requests"] == 1
    assert busy["loads"][0]["token_usage"] == pytest.approx(10 / (4 * 4096))


@pytest.fixture
def logged() -> Iterator[logging.Logger]:
    logger = logging.getLogger("cardan")
    level = logger.level
    yield logger
    logger.setLevel(level)


def test_logging_is_configured(start_fake: Any, logged: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    server = start_fake()
    asked = {"text": "a secret", "sampling_params": {"max_new_tokens": 2}}
    server.http.post("/generate", json=asked)
    assert "request " not in caplog.text
    told = server.http.post("/configure_logging", json={"log_level": "info", "log_requests": True}).json()
    assert told == {"success": True, "log_level": "info", "log_requests": True, "log_request_contents": False}
    server.http.post("/generate", json=asked)
    assert "output 2 tokens" in caplog.text
    assert "a secret" not in caplog.text
    server.http.post("/configure_logging", json={"log_level": "error"})
    assert logged.level == logging.ERROR
    assert server.http.get("/server_info").json()["config"]["server"]["log_requests"] is True
    for body, message in (({}, "Send at least one of"), ({"log_level": "loud"}, "'log_level' should be 'debug'")):
        response = server.http.post("/configure_logging", json=body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"].replace("Input ", "")
    assert server.http.post("/configure_logging", json={"log_request_contents": True}).status_code == 200
    for body in ({"log_requests": False}, {"log_requests": False, "log_request_contents": True}):
        response = server.http.post("/configure_logging", json=body)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "--log-request-contents has no effect without --log-requests" in message
        assert "Each flag is a field of this body" in message
        assert server.app.state.server.config.server.log_requests is True
    off = server.http.post("/configure_logging", json={"log_requests": False, "log_request_contents": False})
    assert off.json()["log_requests"] is False


def test_garbage_is_frozen(start_fake: Any) -> None:
    before = gc.get_freeze_count()
    try:
        told = start_fake().http.post("/freeze_gc").json()
        assert told["frozen_objects"] > before
    finally:
        gc.unfreeze()


def test_models_show_no_path(client: httpx.Client, model: str) -> None:
    listed = client.get("/v1/models")
    assert listed.json()["data"][0]["root"] == model
    assert client.get("/server_info").json()["model_path"] not in listed.text


def test_other_names_of_the_tokenizer(client: httpx.Client) -> None:
    ids = client.post("/v1/tokenize", json={"text": "Hello"}).json()
    assert ids == client.post("/tokenize", json={"text": "Hello"}).json()
    told = client.post("/v1/detokenize", json={"tokens": ids["tokens"]}).json()
    assert told == {"text": "Hello", "prompt": "Hello"}


def test_a_session_is_a_label(client: httpx.Client) -> None:
    asked: dict[str, Any] = {"text": "x", "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    plain = client.post("/generate", json=asked).json()
    assert client.post("/generate", json={**asked, "session_id": "s"}).json()["output_ids"] == plain["output_ids"]


def test_the_admin_key_guards_them(start_fake: Any) -> None:
    server = start_fake(admin_api_key="owner")
    for path in ("/freeze_gc", "/configure_logging"):
        assert server.http.post(path, json={}).status_code == 401


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_logit_processors_are_off(client: httpx.Client, path: str, model: str) -> None:
    asked: dict[str, Any] = {"/generate": {"text": "x"}, "/v1/completions": {"prompt": "x"}}.get(
        path, {"messages": [{"role": "user", "content": "x"}]}
    )
    refused = client.post(path, json={"model": model, **asked, "custom_logit_processor": "counting"})
    assert refused.status_code == 400
    assert "--enable-custom-logit-processor" in refused.json()["error"]["message"]
    pickled = client.post(path, json={"model": model, **asked, "custom_logit_processor": {"callable": "80049521"}})
    assert pickled.status_code == 400
    assert "must be the name of an installed processor" in pickled.json()["error"]["message"]
