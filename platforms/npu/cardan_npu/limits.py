"""Documented limits of ``npu_fused_infer_attention_score`` over pages, and which of them a layer meets.

It imports no torch, so that a plan can tell before anything is opened.

Source: op-plugin, docs/context/torch_npu-npu_fused_infer_attention_score.md, for Atlas A2 and A3.
"""

from __future__ import annotations

from cardan.types import LayerKV

MOST_DIM = 256
MOST_SHARED = 64
MOST_HEADS = 256
MOST_ROWS = 4096
"""Sequences of one call."""
MOST_WIDTH = 65535
MOST_ELEMENTS = 2**31 - 1
"""Of a layer's keys, of which there are as many as of its values."""


def why_not_fused(layer: LayerKV, kv_dtype: str, dtype: str) -> str | None:
    """Which of the fused call's documented limits a layer meets; None where it meets none."""
    reasons = (
        (layer.softcap is not None, "the call has no soft-cap"),
        (layer.sinks, "the call has no sinks"),
        (layer.k_dim != layer.v_dim, f"keys of {layer.k_dim} and values of {layer.v_dim} differ"),
        (layer.k_dim % 16 != 0, f"heads of {layer.k_dim} are no multiple of 16"),
        (layer.k_dim > MOST_DIM, f"heads of {layer.k_dim} exceed {MOST_DIM}"),
        (layer.q_heads // layer.kv_heads > MOST_SHARED, f"more than {MOST_SHARED} heads share keys"),
        (layer.q_heads > MOST_HEADS, f"more than {MOST_HEADS} heads"),
        (layer.kv_heads * layer.k_dim > MOST_WIDTH, f"a token's keys exceed {MOST_WIDTH} numbers"),
        (kv_dtype != dtype, f"keys are {kv_dtype} and queries {dtype}"),
        (dtype not in ("float16", "bfloat16"), f"{dtype} is no type of it"),
    )
    return next((why for holds, why in reasons if holds), None)
