"""Servers for the tests: one per kind of engine for what every engine must do, and fakes with knobs."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

sys.path.append(str(Path(__file__).parent))

from server_fakes import TEMPLATE, FakeEngine, ServerThread, server_config

from cardan.config import (
    CacheConfig,
    EngineConfig,
    GrammarConfig,
    ModelConfig,
    PlatformConfig,
    SchedulerConfig,
    ServerConfig,
)

ENGINES = os.environ.get("CARDAN_TEST_SERVER_ENGINES", "fake,null").split(",")
"""Kinds of engines that tests with the fixture ``server`` run on: ``fake``, the name of a platform, which serves a tiny
model in real processes, or ``smollm2``, which is that model on the CPU. What these tests ask for holds on every
platform and for every model."""

MAX_BODY_BYTES = 4 * 2**20


def _smollm2() -> ModelConfig:
    path = Path(os.environ.get("CARDAN_TEST_MODELS", "/nowhere")) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in CARDAN_TEST_MODELS; `make test` fetches it")
    return ModelConfig(model=str(path), served_model_name="tiny", sampling_defaults="openai")


def _platform_config(kind: str, folder: Path) -> EngineConfig:
    """A tiny model with random weights on a platform; the null platform needs none."""
    from cardan.testing import write_tiny_model

    options = ("step_ms=0.2",) if kind == "null" else ()
    if kind == "smollm2":
        model = _smollm2()
    else:
        weights = None if kind == "null" else 1
        model = ModelConfig(model=str(write_tiny_model(folder)), served_model_name="tiny", random_weights=weights)
    template = folder.with_name("tools.jinja")
    template.write_text(TEMPLATE)
    model = dataclasses.replace(model, chat_template=str(template))
    return EngineConfig(
        model=model,
        platform=PlatformConfig(platform="cpu" if kind == "smollm2" else kind, options=options),
        # The first grammar waits for the backend to read the vocabulary, on a machine that runs other tests too.
        # Weights at random may write white space for ever, where a grammar lets them.
        grammar=GrammarConfig(grammar_compile_timeout_s=120, json_whitespace="none"),
        cache=CacheConfig(max_total_tokens=8192),
        scheduler=SchedulerConfig(random_seed=1, enable_return_hidden_states=True),
        server=ServerConfig(port=0, max_body_bytes=MAX_BODY_BYTES, log_level="error"),
    )


def _start(kind: str, folder: Path) -> ServerThread:
    if kind == "fake":

        async def make() -> Any:
            return FakeEngine()

        return ServerThread(make, server_config(max_body_bytes=MAX_BODY_BYTES)).start()
    config = _platform_config(kind, folder)

    async def make() -> Any:
        from cardan.engine import Frontend

        return await Frontend.start(config)

    return ServerThread(make, config).start()


@pytest.fixture(scope="session", params=ENGINES)
def shared_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """One server per kind of engine."""
    server = _start(request.param, tmp_path_factory.mktemp("served") / "tiny")
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


def _chat_server(**model: Any) -> ServerThread:
    async def make() -> FakeEngine:
        return FakeEngine()

    return ServerThread(make, EngineConfig(model=ModelConfig(**model), server=ServerConfig(port=0))).start()


@pytest.fixture
def start_chat() -> Iterator[Callable[..., ServerThread]]:
    """Starts servers with a fake engine whose model writes as ``start_chat(**model settings)`` says."""
    started: list[ServerThread] = []

    def start(**model: Any) -> ServerThread:
        started.append(_chat_server(**model))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def tool_server() -> Iterator[ServerThread]:
    """A fake engine whose model calls tools and thinks."""
    server = _chat_server(tool_call_parser="hermes", reasoning_parser="qwen3")
    yield server
    server.stop()
