"""Whether FlashInfer is installed, and which layers its paged wrappers take.

It imports neither torch nor FlashInfer.
"""

from __future__ import annotations

from cardan.platform import ModelFacts
from cardan.types import KVKind, LayerKV
from cardan_torch.gpu.presence import library_version

HEAD_SIZES = (64, 128, 256)
"""Head sizes that its kernels are compiled for."""

DTYPES = ("bfloat16", "float16")
KV_DTYPES = ("bfloat16", "float16", "fp8_e4m3", "fp8_e5m2")

TENSOR_CORE_GROUPS = 4
"""From so many query heads a key head on, decode is faster on tensor cores."""

PLAIN_GROUPS = (1, 2, 4, 8)
"""Query heads a key head that its decode kernel without tensor cores takes."""


def flashinfer_version() -> str | None:
    """The version of FlashInfer, or None where it is not installed."""
    return library_version("flashinfer", "flashinfer-python")


def why_not_layer(layer: LayerKV) -> str | None:
    """Why FlashInfer's wrappers do not take a layer; None where they do."""
    if layer.kind not in (KVKind.FULL, KVKind.SLIDING):
        return f"layers of kind {layer.kind.value} need another kernel"
    if layer.sinks:
        return "its wrappers take no attention sinks"
    if layer.k_dim != layer.v_dim or layer.k_dim not in HEAD_SIZES:
        heads = ", ".join(str(size) for size in HEAD_SIZES)
        return f"its kernels take heads of {heads}, the layers have keys of {layer.k_dim} and values of {layer.v_dim}"
    return None


def why_not_flashinfer(facts: ModelFacts, version: str | None) -> str | None:
    """Why a model attends by Triton instead; None where FlashInfer takes all of its layers."""
    if version is None:
        return "flashinfer is not installed"
    if facts.native_dtype not in DTYPES:
        return f"flashinfer computes in {' and '.join(DTYPES)}, the model is {facts.native_dtype}"
    for layer in facts.layers:
        reason = why_not_layer(layer)
        if reason is not None:
            return f"flashinfer is installed, but {reason}"
    return None


def on_tensor_cores(layer: LayerKV, kv_dtype: str) -> bool:
    """Whether decode runs on tensor cores: where many query heads share a key head, or keys have 8 bits."""
    group = layer.q_heads // layer.kv_heads
    return group >= TENSOR_CORE_GROUPS or group not in PLAIN_GROUPS or kv_dtype.startswith("fp8")
