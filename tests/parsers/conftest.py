"""What the tests of parsers share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def models_path() -> Path:
    """The folder named by CARDAN_TEST_MODELS."""
    folder = os.environ.get("CARDAN_TEST_MODELS")
    if folder is None or not (Path(folder) / "qwen3tok").is_dir():
        pytest.skip("CARDAN_TEST_MODELS has no qwen3tok")
    return Path(folder)
