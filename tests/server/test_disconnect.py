"""Clients that leave or do not read: their requests end, and others go on."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest
from server_fakes import FakeEngine, ServerThread


def send(server: ServerThread, path: str, body: dict[str, Any]) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=10)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


LONG = {"max_new_tokens": 1000, "ignore_eos": True}


def test_a_hundred_clients_that_leave(server: ServerThread) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"text": "x", "sampling_params": LONG}),
        ("/generate", {"text": "x", "sampling_params": LONG, "stream": True}),
        ("/generate", {"text": ["x", "y"], "sampling_params": LONG, "stream": True}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 2}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1000, "ignore_eos": True, "stream": True},
        ),
    ]
    socks = [send(server, *bodies[number % len(bodies)]) for number in range(100)]
    time.sleep(0.2)
    for sock in socks:
        sock.close()
    server.wait_idle(30)
    response = server.http.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 2}})
    assert response.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token(start_fake: Any, stream: bool) -> None:
    server = start_fake()
    server.engine.hang = True
    sock = send(server, "/generate", {"text": "x", "stream": stream})
    deadline = time.monotonic() + 5
    while not server.engine.open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.engine.open
    sock.close()
    server.wait_idle()
    assert not server.engine.open


def test_leaving_while_sending_the_body(start_fake: Any) -> None:
    server = start_fake()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.1)
    server.wait_idle()
    assert server.engine.seen == []


def test_slow_reader_blocks_nobody(start_fake: Any) -> None:
    server = start_fake(FakeEngine(context_length=2**16))
    body = {"text": "slow", "sampling_params": {"max_new_tokens": 4096}, "stream": True}
    slow = send(server, "/generate", body)
    # Cumulative text makes some 60 MB of events, more than sockets hold: the stream must stall on its reader.
    time.sleep(0.5)
    started = time.monotonic()
    for _ in range(5):
        assert server.http.post("/generate", json={"text": "quick"}).status_code == 200
    assert time.monotonic() - started < 10
    assert server.stats()["open_requests"] == 1
    slow.close()
    server.wait_idle()


def test_engine_dies_under_open_streams(start_fake: Any) -> None:
    server = start_fake(FakeEngine(delay_s=0.02))
    body = {"text": "x", "sampling_params": {"max_new_tokens": 2000}, "stream": True}
    events = []
    with server.client() as client, client.stream("POST", "/generate", json=body) as response:
        for line in response.iter_lines():
            if line:
                events.append(line.removeprefix("data: "))
            if len(events) == 3:
                server.engine.alive = False
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "engine_dead"
