"""Gumbel noise from Philox4x32-10 in MLX, with the bits of ``cardan.ops.philox``.

It knows no sampling: only seeds, positions and token ids. Words of 32 bits are kept in uint64, so that products need
no high-half instruction.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
ROUNDS = 10
HALF = 1 << 31

Words = tuple[mx.array, mx.array, mx.array, mx.array]


def gumbel(
    seeds: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], ids: mx.array | int, has_float64: bool
) -> mx.array:
    """Noise of ``ids: int32 [rows, k]`` or of all ids below a vocabulary's width; returns float32 ``[rows, k]``.

    One block of four words serves four neighbouring ids, so the whole vocabulary costs a quarter of its width.

    Args:
        seeds: uint64 ``[rows]``.
        positions: int32 ``[rows]``.
        ids: named ids, or how many from 0 on.
        has_float64: whether the device computes in float64; without it the result is within a few ulp.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
    """
    keys = np.asarray(seeds, dtype=np.uint64)
    low, high = keys & np.uint64(MASK), keys >> np.uint64(32)
    place = mx.array(np.asarray(positions).astype(np.uint32).astype(np.uint64)[:, None])
    noise_of = _noise_in_float64 if has_float64 else _noise_in_float32
    if isinstance(ids, int):
        counter = mx.arange((ids + 3) // 4, dtype=mx.uint64)[None]
        words = mx.stack(list(_philox(counter, place, low, high)), axis=-1).reshape(len(keys), 4 * counter.shape[1])
        return noise_of(words[:, :ids])
    wanted = ids.astype(mx.uint64)
    words = mx.stack(list(_philox(wanted >> _word(2), place, low, high)), axis=-1)
    lane = (ids & 3)[..., None]
    return noise_of(mx.take_along_axis(words, lane, axis=-1)[..., 0])


def _word(value: int) -> mx.array:
    return mx.array(value, dtype=mx.uint64)


def _philox(counter: mx.array, place: mx.array, low: np.ndarray[Any, Any], high: np.ndarray[Any, Any]) -> Words:
    """The four words of blocks ``(counter, place, 0, 0)`` under the rows' keys."""
    mask, shift = _word(MASK), _word(32)
    zeros = mx.zeros_like(counter)
    c0, c1, c2, c3 = counter, place, zeros, zeros
    for turn in range(ROUNDS):
        key0, key1 = (
            mx.array(((key + np.uint64(turn * step & MASK)) & np.uint64(MASK))[:, None])
            for key, step in ((low, WEYL[0]), (high, WEYL[1]))
        )
        product0, product1 = c0 * _word(MULTIPLIERS[0]), c2 * _word(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (product1 >> shift) ^ c1 ^ key0,
            product1 & mask,
            (product0 >> shift) ^ c3 ^ key1,
            product0 & mask,
        )
    return c0, c1, c2, c3


def _noise_in_float64(words: mx.array) -> mx.array:
    """``-log(-log((word + 0.5) / 2^32))``, rounded once."""
    uniform = (words.astype(mx.float64) + mx.array(0.5, mx.float64)) * mx.array(2.0**-32, mx.float64)
    return (-mx.log(-mx.log(uniform))).astype(mx.float32)


def _noise_in_float32(words: mx.array) -> mx.array:
    """The same without float64: above one half, ``1 - u`` keeps the digits that ``u`` would lose."""
    upper = words >= _word(HALF)
    near_zero = (words.astype(mx.float32) + 0.5) * 2.0**-32
    near_one = ((_word(MASK) - words).astype(mx.float32) + 0.5) * 2.0**-32
    inner = mx.where(upper, -mx.log1p(-mx.minimum(near_one, 0.5)), -mx.log(mx.minimum(near_zero, 0.5)))
    return -mx.log(inner)
