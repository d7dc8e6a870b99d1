"""Whether AITER is installed, and which layers its paged attention takes.

It imports neither torch nor AITER. Another package on PyPI has the same module name; it is told apart by its files.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from cardan.platform import ModelFacts
from cardan.types import KVKind, LayerKV

HEAD_SIZES = (64, 128)
DTYPES = ("bfloat16", "float16")
ARCHS = ("gfx942", "gfx950")
"""Chips that its kernels are written for."""


def has_aiter() -> bool:
    """Whether AMD's AITER is installed."""
    found = find_spec("aiter")
    return found is not None and found.origin is not None and (Path(found.origin).parent / "ops" / "mha.py").exists()


def why_not_layer(layer: LayerKV) -> str | None:
    """Why AITER's paged attention does not take a layer; None where it does."""
    if layer.kind is not KVKind.FULL:
        return f"layers of kind {layer.kind.value} need another kernel"
    if layer.sinks:
        return "its paged attention takes no sinks"
    if layer.k_dim != layer.v_dim or layer.k_dim not in HEAD_SIZES:
        heads = " and ".join(str(size) for size in HEAD_SIZES)
        return f"its kernels take heads of {heads}, the layers have keys of {layer.k_dim} and values of {layer.v_dim}"
    return None


def why_not_aiter(facts: ModelFacts, arch: str, installed: bool) -> str | None:
    """Why a model attends by Triton instead; None where AITER takes all of its layers."""
    if not installed:
        return "aiter is not installed"
    if arch not in ARCHS:
        return f"aiter's kernels are for {' and '.join(ARCHS)}, this is {arch}"
    if facts.native_dtype not in DTYPES:
        return f"aiter computes in {' and '.join(DTYPES)}, the model is {facts.native_dtype}"
    for layer in facts.layers:
        reason = why_not_layer(layer)
        if reason is not None:
            return f"aiter is installed, but {reason}"
    return None
