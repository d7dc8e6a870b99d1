"""What both attention kernels are passed: checked, and put into the order that they take it in.

It knows no grid and no configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from cardan.errors import UnsupportedError
from cardan_kernels.attention.scoring import Scoring
from cardan_kernels.attention.shape import AttentionShape
from cardan_kernels.chips import chip_of
from cardan_kernels.kv_formats import as_stored
from cardan_kernels.paged import PagedKV

LOG2_E = math.log2(math.e)
NO_WINDOW = 2**30
"""Stands for no window: longer than any row."""
SMALLEST_BLOCK = 16
"""Of an axis that matrix units multiply over."""
QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of either kernel.

    Attributes:
        shape: heads.
        chip: that it runs on.
        out: ``[tokens, q_heads * v_dim]``.
        pool: keys, values and the table.
        strides: of ``q`` (token, head), keys (slot, head), values (slot, head), the table's lines and ``out``.
        numbers: factor on scores to base 2, what goes into a soft-cap, factor on values, window, log of the page size.
        constants: what a kernel is compiled for.
    """

    shape: AttentionShape
    chip: str
    out: torch.Tensor
    pool: tuple[torch.Tensor, ...]
    strides: tuple[int, ...]
    numbers: tuple[float, float, float, int, int]
    constants: dict[str, Any]

    @classmethod
    def of(cls, q: torch.Tensor, kv: PagedKV, scoring: Scoring, out: torch.Tensor | None) -> AttentionCall:
        """Check a call's arguments and work out the rest.

        Raises:
            UnsupportedError: types or widths that the kernels do not take.
        """
        if q.dtype not in QUERY_DTYPES or q.stride(-1) != 1 or q.shape[2] != kv.k_dim:
            raise UnsupportedError(
                f"queries must be float32, bfloat16 or float16, contiguous in their last axis, and {kv.k_dim} wide as "
                f"keys are, got {q.dtype} of shape {list(q.shape)} with strides {q.stride()}. Cast or copy them."
            )
        shape = AttentionShape(q.shape[1], kv.kv_heads, kv.k_dim, kv.v_dim, q.dtype, kv.keys.dtype)
        if out is None:
            out = q.new_empty((q.shape[0], shape.q_heads * shape.v_dim))
        return cls(
            shape,
            chip_of(q.device),
            out,
            (as_stored(kv.keys), as_stored(kv.values), kv.table),
            (
                *q.stride()[:2],
                *kv.keys.stride()[:2],
                *kv.values.stride()[:2],
                kv.table.stride(0),
                out.stride(0),
            ),
            _numbers(kv, scoring),
            {
                "CAPPED": scoring.softcap is not None,
                "FORMAT": kv.format.code,
                "K_DIM": shape.k_dim,
                "V_DIM": shape.v_dim,
                "BLOCK_K": padded(shape.k_dim),
                "BLOCK_V": padded(shape.v_dim),
            },
        )


def padded(width: int) -> int:
    """The power of two that a width is padded to."""
    return max(SMALLEST_BLOCK, 1 << (width - 1).bit_length())


def _numbers(kv: PagedKV, scoring: Scoring) -> tuple[float, float, float, int, int]:
    """Scales of floats of 8 bits go into the factors on scores and on results, which are in float32."""
    unit = kv.format.unit
    k_scale, v_scale = (kv.k_scale, kv.v_scale) if kv.format.code else (1.0, 1.0)
    scale = scoring.scale * k_scale * unit
    factor = scale if scoring.softcap is None else scoring.softcap
    inside_cap = 0.0 if scoring.softcap is None else scale / scoring.softcap
    window = NO_WINDOW if scoring.window is None else scoring.window
    return factor * LOG2_E, inside_cap, v_scale * unit, window, kv.page_size.bit_length() - 1
