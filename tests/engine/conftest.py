"""Engines on the null platform, shared by the tests of this folder."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from cardan.config import EngineConfig
from cardan.engine import Engine
from cardan.engine.options import config_from_options
from cardan.testing import write_tiny_model
from cardan.testing.null_tokens import Vocabulary
from cardan.testing.tiny_model import IM_END_ID, VOCAB_SIZE

VOCABULARY = Vocabulary(size=VOCAB_SIZE, eos_ids=(IM_END_ID,))


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """What the null platform chooses from with the tiny model."""
    return VOCABULARY


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config and tokenizer, without weights."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def null_config(tiny_model: Path) -> Callable[..., EngineConfig]:
    """A config on the null platform, with options of the caller's."""

    def make(**options: Any) -> EngineConfig:
        return config_from_options(
            {"platform": "null", "model": str(tiny_model), "random_seed": 1, "log_level": "error", **options}
        )

    return make


class Running:
    """A started engine, and its frontend used from tests as if they were coroutines of its event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.frontend = engine._frontend

    def run(self, scenario: Coroutine[Any, Any, Any], timeout_s: float = 30) -> Any:
        """Run a coroutine on the engine's loop."""
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(scenario, timeout_s), self.engine._loop)
        return future.result()


@pytest.fixture(scope="session")
def engine(null_config) -> Iterator[Running]:
    """The engine that most tests share: overlapped loop, a pool of 2,000 tokens, steps of half a millisecond."""
    config = null_config(max_total_tokens=2000, platform_options={"step_ms": 0.5})
    with Engine(config=config) as started:
        yield Running(started)


@pytest.fixture
def start_engine(null_config) -> Iterator[Callable[..., Running]]:
    """Starts engines with options of the test's own; they are shut down after it."""
    engines: list[Engine] = []

    def start(**options: Any) -> Running:
        engines.append(Engine(config=null_config(**options)))
        return Running(engines[-1])

    yield start
    for engine in engines:
        engine.shutdown()


@pytest.fixture(autouse=True)
def _quiet_frontend(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="cardan")
