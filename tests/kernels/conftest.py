"""Kernels run in Triton's interpreter, whose bfloat16 is put right first; without Triton nothing is collected."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("triton") and find_spec("torch") else ["*.py"]


@pytest.fixture(scope="session", autouse=True)
def repaired_interpreter() -> None:
    """Round bfloat16 as GPUs do."""
    from cardan_kernels.interpreter import repair

    repair()
