"""Attention of new tokens over the paged keys and values of their rows: prefill, extension and mixed batches.

It knows no model. Keys and values of the new tokens are in the pool already.
"""

from __future__ import annotations

import torch

from cardan_kernels.attention.scoring import Scoring
from cardan_kernels.paged import PagedKV


def prefill(
    q: torch.Tensor, kv: PagedKV, tiles: torch.Tensor, scoring: Scoring, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention of ``q: [tokens, q_heads, k_dim]``, whose rows are cut into ``tiles``.

    Args:
        q: float32, bfloat16 or float16; the last axis is contiguous, the others may be strided.
        kv: the layer's pool, with the new tokens' keys and values.
        tiles: int32 ``[tiles, 4]`` on the device, from ``plan_tiles``.
        scoring: how scores are made.
        out: ``[tokens, q_heads * v_dim]`` for the result; tokens of no tile are left as they are.

    Returns:
        ``[tokens, q_heads * v_dim]`` in the type of ``q``.
    """
