"""Requests that are aborted, or whose clients leave, while their conversation is still rendered or tokenized."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from server_fakes import ServerThread
from test_disconnect import send

from cardan.errors import RequestError
from cardan.server.serve import finish_open_requests
from cardan.server.state import ServerState

LONG = "x" * 5000
"""Conversations of this length are rendered and tokenized beside the event loop."""

CHAT = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": {"model": "tiny", **CHAT},
    "/v1/responses": {"input": LONG, "max_output_tokens": 4},
    "/api/chat": {"model": "tiny", **CHAT, "max_tokens": None, "options": {"num_predict": 4}},
    "/api/generate": {"model": "tiny", "prompt": LONG, "raw": True, "options": {"num_predict": 4}},
}
BODIES["/api/chat"].pop("max_tokens")


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


@pytest.fixture
def hold(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    """Holds rendering or tokenizing of the shared server."""
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
def post(server: ServerThread) -> Iterator[Callable[..., Future[httpx.Response]]]:
    """Sends a body from another thread."""
    with ThreadPoolExecutor(4) as threads, server.client() as client:
        yield lambda path, body: threads.submit(client.post, path, json=body)


def num_started(server: ServerThread) -> int:
    """How many requests the engine has taken so far."""
    return int(server.stats()["totals"].get("requests", 0))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_an_aborted_request_never_starts(
    server: ServerThread, hold: Hold, post: Any, state: ServerState, path: str, stream: bool
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
    assert not state.preparing


def test_an_id_is_known_before_the_request_starts(
    server: ServerThread, hold: Hold, post: Any, state: ServerState
) -> None:
    before = num_started(server)
    held = hold()
    first, other = (post("/v1/chat/completions", {**CHAT, "rid": rid, "n": 2}) for rid in ("first", "other"))
    assert held.reached.wait(30)
    while len(state.preparing) < 2:
        server.stats()
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
    assert not state.preparing


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_starts_nothing(server: ServerThread, hold: Hold, state: ServerState, path: str) -> None:
    before = num_started(server)
    held = hold("encode", [1, 2, 3]) if path == "/api/generate" else hold()
    sock = send(server, path, BODIES[path])
    assert held.reached.wait(30)
    assert len(state.preparing) == 1
    sock.close()
    server.wait_idle()  # although what was begun in a thread is still held
    assert not state.preparing
    held.released.set()
    assert num_started(server) == before


@pytest.mark.parametrize("path", list(BODIES)[:4])
def test_nothing_is_left_of_what_cannot_be_prepared(
    server: ServerThread, hold: Hold, post: Any, state: ServerState, path: str
) -> None:
    held = hold(result=RequestError("The template refuses this."))
    answer = post(path, BODIES[path])
    assert held.reached.wait(30)
    server.http.post("/abort_request", json={"abort_all": True})
    held.released.set()
    assert answer.result(30).status_code == 400
    assert "The template refuses this." in answer.result().text
    server.wait_idle()
    assert not state.preparing


def test_a_background_response_that_is_aborted_is_cancelled(server: ServerThread, hold: Hold, post: Any) -> None:
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
    server: ServerThread, hold: Hold, post: Any, state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = num_started(server)
    held = hold()
    answer = post("/v1/chat/completions", CHAT)
    assert held.reached.wait(30)
    (preparation,) = state.preparing.values()
    at_once = dataclasses.replace(state.config.server, drain_timeout_s=0.0)
    monkeypatch.setattr(state, "config", dataclasses.replace(state.config, server=at_once))
    draining = asyncio.run_coroutine_threadsafe(finish_open_requests(state), server.loop)
    while not preparation.aborted:
        server.stats()
    held.released.set()
    assert answer.result(30).json()["choices"][0]["finish_reason"] == "abort"
    draining.result(30)
    assert num_started(server) == before


def test_a_shutdown_waits_for_what_is_prepared(server: ServerThread, hold: Hold, post: Any, state: ServerState) -> None:
    held = hold()
    answer = post("/v1/chat/completions", CHAT)
    assert held.reached.wait(30)
    assert server.call(state.wait_until_idle(0.01)) is False
    held.released.set()
    assert answer.result(30).status_code == 200
    assert server.call(state.wait_until_idle(30)) is True
