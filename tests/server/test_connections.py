"""Connections whose client does nothing are closed, and cost nobody else anything."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from typing import Any

import httpx
from server_fakes import FakeEngine, ServerThread

from cardan.server.http.connections import raise_file_limit

LIMIT_S = 0.4


def connect(server: ServerThread) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def is_closed(connection: socket.socket, within_s: float) -> bool:
    """Whether the other side closes within a time."""
    connection.settimeout(within_s)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def test_an_idle_connection_is_closed(start_fake: Any) -> None:
    server = start_fake(client_timeout_s=LIMIT_S)
    with connect(server) as connection:
        started_s = time.monotonic()
        assert is_closed(connection, 10)
        assert time.monotonic() - started_s >= LIMIT_S * 0.9


def test_half_a_request_is_closed_and_a_whole_one_answered(start_fake: Any) -> None:
    server = start_fake(client_timeout_s=LIMIT_S)
    for half in (b"POST /generate HTTP/1.1\r\nHost: x\r\n", b'POST /generate HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"t'):
        with connect(server) as connection:
            connection.sendall(half)
            assert is_closed(connection, 10)
    assert server.http.post("/generate", json={"text": "x"}).status_code == 200


def test_a_request_that_comes_in_pieces_is_waited_for(start_fake: Any) -> None:
    server = start_fake(client_timeout_s=LIMIT_S)
    whole = b'POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 13\r\n\r\n{"text":"ab"}'
    with connect(server) as connection:
        # Longer than the limit in all, and shorter between two pieces.
        for start in range(0, len(whole), 16):
            connection.sendall(whole[start : start + 16])
            time.sleep(LIMIT_S / 3)
        connection.settimeout(10)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_long_answer_is_not_idle(start_fake: Any) -> None:
    server = start_fake(FakeEngine(delay_s=LIMIT_S * 2), client_timeout_s=LIMIT_S)
    body = {"text": "x", "sampling_params": {"max_new_tokens": 2}}
    assert server.http.post("/generate", json=body).status_code == 200


def test_a_reader_that_stopped_is_closed_and_its_request_aborted(start_fake: Any) -> None:
    server = start_fake(FakeEngine(), client_timeout_s=LIMIT_S)
    body = b'{"text":"x","stream":true,"sampling_params":{"max_new_tokens":1500}}'
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(head + body)
        server.wait_idle()
        read = b""
        with contextlib.suppress(OSError):
            while piece := connection.recv(65536):
                read += piece
    assert read.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in read


def test_a_thousand_idle_connections_leave_room(start_fake: Any) -> None:
    raise_file_limit()
    count = min(1000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 100)
    server = start_fake(client_timeout_s=30.0)
    with contextlib.ExitStack() as held:
        for _ in range(count):
            held.enter_context(connect(server))
        with httpx.Client(base_url=server.url, timeout=10, verify=False) as client:
            assert client.get("/health").status_code == 200
            assert client.post("/generate", json={"text": "x"}).status_code == 200


def test_the_file_limit_is_raised_to_what_the_system_allows() -> None:
    allowed = raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == allowed
