"""The inner loop of both attention kernels: blocks of paged keys and values under a running softmax.

It knows no grid. Scores stay in units of ``factor``, with logarithms to base 2.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", algorithm 3; Dao et al.,
"FlashAttention", algorithm 1; Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 4.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cardan_kernels import float8
from cardan_kernels.elementary import tanh


@triton.jit
def stored(pointers, mask, dtype, FORMAT: tl.constexpr):
    """Elements of a pool in ``dtype``; floats of 8 bits are smaller than they stand for by their format's unit."""
    if mask is None:  # noqa: SIM108 (decided while compiling)
        raw = tl.load(pointers)
    else:
        raw = tl.load(pointers, mask=mask, other=0)
    if FORMAT != 0:
        raw = float8.decode(raw, FORMAT)
    return raw.to(dtype)


@triton.jit
def attend_blocks(
    state, q, blocks, seen, pool, strides, lookup, numbers,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Take the keys of ``blocks`` (the first, and the one behind the last) into the running softmax.

    ``state``: weighted sums of values ``[m, BLOCK_V]``, sums of exponentials ``[m]`` and largest scores ``[m]``.
    ``seen``: positions of the queries ``[m]``, the window, and the first key and the one behind the last that are
    read at all. ``pool`` and ``strides``: pointers to keys and values of one head, and from slot to slot.
    ``lookup``: pointer to the row's line of the table, and the logarithm of the page size. ``numbers``: factor on
    scores, to base 2; and what goes into a soft-cap. ``MASKED``: whether some query does not see some of these keys.
    """
    acc, total, top = state
    position, window, first_key, last_key = seen
    line, page_shift = lookup
    factor, inside_cap = numbers
    k_column = tl.arange(0, BLOCK_K)
    v_column = tl.arange(0, BLOCK_V)
    within_page = (1 << page_shift) - 1
    for block in range(blocks[0], blocks[1]):
        key = block * BLOCK_N + tl.arange(0, BLOCK_N)
        k_mask = None
        v_mask = None
        if MASKED:
            read = (key >= first_key) & (key < last_key)
            entry = tl.load(line + (key >> page_shift), mask=read, other=0)
            k_mask = read[None, :] & (k_column < K_DIM)[:, None]
            v_mask = read[:, None] & (v_column < V_DIM)[None, :]
        else:
            entry = tl.load(line + (key >> page_shift))
            if K_DIM != BLOCK_K:
                k_mask = (k_column < K_DIM)[:, None] & (key >= 0)[None, :]
            if V_DIM != BLOCK_V:
                v_mask = (v_column < V_DIM)[None, :] & (key >= 0)[:, None]
        slot = (entry.to(tl.int64) << page_shift) + (key & within_page)
        keys = stored(pool[0] + slot[None, :] * strides[0] + k_column[:, None], k_mask, q.dtype, FORMAT)
        scores = tl.dot(q, keys, input_precision="ieee")
        if CAPPED:
            scores = tanh(scores * inside_cap)
        if MASKED:
            visible = (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        base = new_top
        if MASKED:
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shares = tl.exp2(tl.fma(scores, factor, -base[:, None]))
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(shares, 1)
        values = stored(pool[1] + slot[:, None] * strides[1] + v_column[None, :], v_mask, q.dtype, FORMAT)
        acc = tl.dot(shares.to(q.dtype), values, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return acc, total, top
