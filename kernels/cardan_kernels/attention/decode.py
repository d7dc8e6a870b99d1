"""Attention of one new token a row, with the keys of each row split over the chip and put together by a second pass.

It knows no model. Keys and values of the new tokens are in the pool already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cardan_kernels.attention.scoring import Scoring
from cardan_kernels.attention.splits import Splits
from cardan_kernels.paged import PagedKV


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows with one new token each. All tensors keep their addresses where the launch is captured.

    Attributes:
        lengths: int32 ``[rows]``, keys of each row, the new one included; rows of length 0 give 0.
        table_rows: int32 ``[rows]``, each row's line of the table.
        tokens: int32 ``[rows]``, each row's token in ``q`` and in the result; None where row ``i`` is token ``i``.
    """

    lengths: torch.Tensor
    table_rows: torch.Tensor
    tokens: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecodeSplits:
    """How rows are split, and where their parts stand until they are put together.

    Attributes:
        splits: how rows are split.
        scratch: float32, contiguous, of at least ``scratch_size`` elements; layers may share it.
    """

    splits: Splits
    scratch: torch.Tensor


def scratch_size(rows: int, q_heads: int, v_dim: int, splits: Splits) -> int:
    """Elements of float32 that ``decode`` needs beside its arguments; 0 where nothing is split."""
    return 0 if splits.count == 1 else rows * q_heads * splits.count * (v_dim + 1)


def decode(
    q: torch.Tensor,
    kv: PagedKV,
    rows: DecodeRows,
    scoring: Scoring,
    split: DecodeSplits,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ``q: [tokens, q_heads, k_dim]``, one token a row, over all keys of its row.

    Args:
        q: float32, bfloat16 or float16; the last axis is contiguous, the others may be strided.
        kv: the layer's pool, with the new tokens' keys and values.
        rows: the rows; their lengths are read on the device.
        scoring: how scores are made.
        split: how rows are split.
        out: ``[tokens, q_heads * v_dim]`` for the result; tokens of no row are left as they are.

    Returns:
        ``[tokens, q_heads * v_dim]`` in the type of ``q``.
    """
