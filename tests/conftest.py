"""Fixtures that every test folder may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def models_folder() -> Path | None:
    """The folder named by CARDAN_TEST_MODELS, or None."""
    folder = os.environ.get("CARDAN_TEST_MODELS")
    return Path(folder) if folder else None


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The bundled model's GGUF file; `make test` fetches it and sets CARDAN_TEST_MODELS."""
    folder = models_folder()
    path = folder / SMOLLM2_FILE if folder else None
    if path is None or not path.is_file():
        pytest.skip(f"{SMOLLM2_FILE} is not in CARDAN_TEST_MODELS; `make test` fetches it")
    return path
