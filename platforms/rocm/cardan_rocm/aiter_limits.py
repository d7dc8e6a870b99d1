"""Whether AITER is installed, and which layers its paged attention takes.

It imports neither torch nor AITER. Another package on PyPI has the same module name; it is told apart by its files.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from cardan.platform import ModelFacts
from cardan.types import KVKind
from cardan_torch.gpu.library_limits import LibraryLimits

AITER = LibraryLimits(
    name="aiter",
    dtypes=("bfloat16", "float16"),
    kv_dtypes=None,
    head_sizes=(64, 128),
    kinds=(KVKind.FULL,),
)
ARCHS = ("gfx942", "gfx950")
"""Chips that its kernels are written for."""


def has_aiter() -> bool:
    """Whether AMD's AITER is installed."""
    found = find_spec("aiter")
    return found is not None and found.origin is not None and (Path(found.origin).parent / "ops" / "mha.py").exists()


def why_not_aiter(facts: ModelFacts, arch: str, installed: bool) -> str | None:
    """Why a model attends by Triton instead; None where AITER takes all of its layers."""
    if not installed:
        return "aiter is not installed"
    if arch not in ARCHS:
        return f"aiter's kernels are for {' and '.join(ARCHS)}, this is {arch}"
    return AITER.why_not_model(facts)
