"""Servers for the tests: one per kind of engine for what every engine must do, and fakes with knobs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

sys.path.append(str(Path(__file__).parent))

from server_fakes import FakeEngine, ServerThread, server_config

ENGINES = ["fake"]
"""Kinds of engines that the tests with the fixture ``server`` run on; see ``_start``."""


def _start(kind: str) -> ServerThread:
    assert kind == "fake"

    async def make() -> FakeEngine:
        return FakeEngine()

    return ServerThread(make, server_config(max_body_bytes=4 * 2**20)).start()


@pytest.fixture(scope="session", params=ENGINES)
def shared_server(request: pytest.FixtureRequest) -> Iterator[ServerThread]:
    """One server per kind of engine."""
    server = _start(request.param)
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: ServerThread) -> Iterator[ServerThread]:
    """The shared server; a test that leaves a request behind fails."""
    yield shared_server
    shared_server.wait_idle()


@pytest.fixture
def client(server: ServerThread) -> httpx.Client:
    """An HTTP client of the shared server."""
    return server.http


@pytest.fixture(scope="session")
def shared_api(shared_server: ServerThread) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the shared server."""
    with shared_server.openai() as api:
        yield api


@pytest.fixture
def api(server: ServerThread, shared_api: openai.OpenAI) -> openai.OpenAI:
    """OpenAI's client of the shared server, where tests must leave nothing behind."""
    return shared_api


@pytest.fixture
def model(server: ServerThread) -> str:
    """The served model's name."""
    return str(server.http.get("/v1/models").json()["data"][0]["id"])


@pytest.fixture
def start_fake() -> Iterator[Callable[..., ServerThread]]:
    """Starts servers with a fake engine of one's own: ``start_fake(engine, **server settings)``."""
    started: list[ServerThread] = []

    def start(engine: FakeEngine | None = None, **settings: Any) -> ServerThread:
        async def make() -> FakeEngine:
            return engine or FakeEngine()

        started.append(ServerThread(make, server_config(**settings)).start())
        return started[-1]

    yield start
    for server in started:
        server.stop()
