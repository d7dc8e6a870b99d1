"""Rotary position embedding, and the write of keys and values into a paged pool, apart or in one launch.

It knows no model and no attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cardan_kernels.paged import PagedKV


@dataclass(frozen=True, slots=True)
class Rotation:
    """How heads are rotated.

    Attributes:
        cos: float32 ``[context, rotary_dim / 2]``; the first ``rotary_dim`` features of a head are rotated.
        sin: float32, of the same shape.
        interleaved: whether the features of a pair are neighbours, and not half of ``rotary_dim`` apart.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False


def rope(x: torch.Tensor, positions: torch.Tensor, rotation: Rotation, out: torch.Tensor | None = None) -> torch.Tensor:
    """``x: [tokens, heads, dim]`` rotated by ``positions: int32 or int64 [tokens]``, computed in float32.

    Args:
        x: the last axis is contiguous, the others may be strided.
        positions: rows of the tables.
        rotation: the tables.
        out: for the result, of the shape and type of ``x``; may be ``x``.
    """


def write_kv(k: torch.Tensor, v: torch.Tensor, kv: PagedKV, out_slots: torch.Tensor) -> None:
    """Write ``k: [tokens, kv_heads, k_dim]`` and ``v: [tokens, kv_heads, v_dim]`` to their slots of a pool.

    Args:
        k: float32, bfloat16 or float16; the last axis is contiguous, the others may be strided.
        v: likewise.
        kv: the pool. Floats of 8 bits hold ``k / k_scale`` and ``v / v_scale``, rounded to nearest even; what is
            larger than the largest of them becomes that one, and NaN stays NaN.
        out_slots: int32 or int64 ``[tokens]``; where tokens share a slot, any of them may stay (padding does).
    """


def rope_and_write_kv(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    rotation: Rotation,
    kv: PagedKV,
    out_slots: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, and write keys and values to their slots, in one launch: ``rope`` and ``write_kv``.

    Rotated keys are rounded to the type of ``k`` before they are stored, so that both ways give the same bits.

    Args:
        qkv: queries ``[tokens, q_heads, k_dim]``, keys and values, as ``write_kv`` takes them.
        positions: int32 or int64 ``[tokens]``.
        rotation: the tables.
        kv: the pool.
        out_slots: int32 or int64 ``[tokens]``.
        out: for the rotated queries, of the shape and type of the queries; may be the queries.

    Returns:
        The rotated queries.
    """
