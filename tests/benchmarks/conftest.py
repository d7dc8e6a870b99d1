"""How tests reach the scripts in benchmarks/, which are no package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def load_module() -> Iterator[Callable[[str], Any]]:
    """Imports a script by its name, while the folder is where Python looks."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(FOLDER))
