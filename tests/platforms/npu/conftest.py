"""The simulator of torch_npu for the tests of this folder, and for no others of the same process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SIMULATORS = str(Path(__file__).parents[2] / "simulators")
_kept: dict[str, ModuleType] = {}


def _ours(name: str) -> bool:
    return name == "torch_npu" or name.startswith("torch_npu.")


@pytest.fixture(scope="module")
def torch_npu() -> Iterator[Any]:
    """The simulator, which torch can be told of once per process only."""
    pytest.importorskip("torch")
    sys.path.insert(0, SIMULATORS)
    sys.modules.update(_kept)
    module = importlib.import_module("torch_npu")
    _kept.update({name: found for name, found in sys.modules.items() if _ours(name)})
    try:
        yield module
    finally:
        sys.path.remove(SIMULATORS)
        for name in _kept:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def device(torch_npu: Any) -> Iterator[Any]:
    """The simulated NPU, opened."""
    from cardan_npu import platform

    found = platform.open(platform.devices()[0], {"graph_max_rows": 4})
    with found.scope():
        yield found
    found.close()
