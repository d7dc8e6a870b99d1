"""A tiny llama and sequences that show chunks, cached prefixes and decode steps, shared by this folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
from accuracy_tiny import tiny_cases, tiny_config

from cardan.accuracy.cases import Case
from cardan.accuracy.golden import Golden
from cardan.accuracy.recording import Wanted, record
from cardan.testing.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def cases() -> tuple[Case, ...]:
    return tiny_cases()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer whose ids it can take: bytes below its vocabulary."""
    folder = tmp_path_factory.mktemp("with-tokenizer")
    written = write_tiny_model(folder / "tokenizer")
    copied = folder / tiny_llama.name
    shutil.copytree(tiny_llama, copied)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(written / name, copied / name)
    return copied


Record = Callable[..., Golden]


@pytest.fixture(scope="session")
def recorded(tiny_llama: Path, cases: tuple[Case, ...]) -> Record:
    """Records of the tiny model by platform, type and chunk, each made once."""
    made: dict[tuple[object, ...], Golden] = {}

    def make(platform: str = "mlx", dtype: str = "float32", chunk: int = 16, noise: bool = True) -> Golden:
        key = (platform, dtype, chunk, noise)
        if key not in made:
            made[key] = record(
                tiny_config(tiny_llama, platform, dtype, chunk), Wanted(cases=cases, noise=noise, semantics=False)
            )
        return made[key]

    return make
