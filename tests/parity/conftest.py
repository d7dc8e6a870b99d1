"""Models that comparisons of real answers need, where they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cardan.config import ModelConfig
from cardan.errors import CardanError
from cardan.weights import locate_model

CODER_FILE = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
CODER = f"Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/{CODER_FILE}"


@pytest.fixture(scope="session")
def coder_path() -> Path:
    """A model of code whose weights are K-quants: in the folder of test models, else on the hub or in its cache."""
    kept = Path(os.environ.get("CARDAN_TEST_MODELS") or "/nowhere") / CODER_FILE
    if kept.is_file():
        return kept
    try:
        return locate_model(ModelConfig(model=CODER)).path
    except CardanError as error:
        pytest.skip(f"{CODER_FILE} is not in CARDAN_TEST_MODELS, and could not be fetched: {error}")
