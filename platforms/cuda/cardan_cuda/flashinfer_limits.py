"""Whether FlashInfer is installed, and which layers its paged wrappers take.

It imports neither torch nor FlashInfer.
"""

from __future__ import annotations

from cardan.platform import ModelFacts
from cardan.types import KVKind, LayerKV
from cardan_torch.gpu.library_limits import LibraryLimits
from cardan_torch.gpu.presence import library_version

FLASHINFER = LibraryLimits(
    name="flashinfer",
    dtypes=("bfloat16", "float16"),
    kv_dtypes=("bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"),
    head_sizes=(64, 128, 256),
    kinds=(KVKind.FULL, KVKind.SLIDING),
)

TENSOR_CORE_GROUPS = 4
"""From so many query heads a key head on, decode is faster on tensor cores."""

PLAIN_GROUPS = (1, 2, 4, 8)
"""Query heads a key head that its decode kernel without tensor cores takes."""


def flashinfer_version() -> str | None:
    """The version of FlashInfer, or None where it is not installed."""
    return library_version("flashinfer", "flashinfer-python")


def why_not_flashinfer(facts: ModelFacts, version: str | None) -> str | None:
    """Why a model attends by Triton instead; None where FlashInfer takes all of its layers."""
    return "flashinfer is not installed" if version is None else FLASHINFER.why_not_model(facts)


def on_tensor_cores(layer: LayerKV, kv_dtype: str) -> bool:
    """Whether decode runs on tensor cores: where many query heads share a key head, or keys have 8 bits."""
    group = layer.q_heads // layer.kv_heads
    return group >= TENSOR_CORE_GROUPS or group not in PLAIN_GROUPS or kv_dtype.startswith("fp8")
