"""Attention of new tokens over the paged keys and values of their rows: prefill, extension and mixed batches.

It knows no model. Keys and values of the new tokens are in the pool already.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cardan_kernels.attention.arguments import AttentionCall
from cardan_kernels.attention.scoring import Scoring
from cardan_kernels.attention.shape import prefill_config
from cardan_kernels.attention.softmax import attend_blocks
from cardan_kernels.launching import on_device_of
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
    call = AttentionCall.of(q, kv, scoring, out)
    config = prefill_config(call.shape, call.chip)
    block_m = config["block_m"]
    heads = min(call.shape.group, block_m)
    head_tiles = -(-call.shape.group // heads)
    if tiles.shape[0] == 0:
        return call.out
    with on_device_of(q):
        _prefill_kernel[(tiles.shape[0], call.shape.kv_heads * head_tiles)](
            q,
            *call.pool,
            tiles,
            scoring.sinks,
            call.out,
            *call.strides,
            *call.numbers,
            call.shape.group,
            heads,
            head_tiles,
            BLOCK_M=block_m,
            BLOCK_N=config["block_n"],
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **call.constants,
        )
    return call.out


@triton.jit(do_not_specialize=["window", "page_shift", "group", "heads", "head_tiles"])
def _prefill_kernel(
    q, keys, values, table, tiles, sinks, out,
    q_token_stride, q_head_stride, k_slot_stride, k_head_stride, v_slot_stride, v_head_stride, line_stride, out_stride,
    factor, inside_cap, v_factor, window, page_shift, group, heads, head_tiles,
    CAPPED: tl.constexpr, FORMAT: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of queries, with all heads of one key head as far as they fit: row ``m`` is token ``m // heads``."""
    tile = tiles + tl.program_id(0) * 4
    first_token, count = tl.load(tile), tl.load(tile + 1)
    first_position, line = tl.load(tile + 2), tl.load(tile + 3).to(tl.int64)
    kv_head = (tl.program_id(1) // head_tiles).to(tl.int64)
    first_head = (tl.program_id(1) % head_tiles) * heads
    row = tl.arange(0, BLOCK_M)
    token, in_group = row // heads, first_head + row % heads
    live = (token < count) & (in_group < group)
    head = kv_head * group + in_group
    token_at = (first_token + token).to(tl.int64)
    k_column, v_column = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    q_rows = q + token_at * q_token_stride + head * q_head_stride
    queries = tl.load(q_rows[:, None] + k_column[None, :], mask=live[:, None] & (k_column < K_DIM)[None, :], other=0.0)

    last_key = first_position + count
    first_key = tl.maximum(first_position - window + 1, 0)
    begin, end = first_key // BLOCK_N, (last_key + BLOCK_N - 1) // BLOCK_N
    all_in_window = tl.maximum(last_key - window + BLOCK_N - 1, 0) // BLOCK_N
    lead = tl.minimum(tl.maximum(all_in_window, begin), end)
    full = tl.maximum((first_position + 1) // BLOCK_N, lead)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    state = (tl.zeros([BLOCK_M, BLOCK_V], tl.float32), total, top)
    seen = (first_position + token, window, first_key, last_key)
    pool = (keys + kv_head * k_head_stride, values + kv_head * v_head_stride)
    strides = (k_slot_stride, v_slot_stride)
    lookup = (table + line * line_stride, page_shift)
    numbers = (factor, inside_cap)
    state = attend_blocks(
        state, queries, (begin, lead), seen, pool, strides, lookup, numbers,
        True, CAPPED, FORMAT, BLOCK_N, K_DIM, V_DIM, BLOCK_K, BLOCK_V,
    )  # fmt: skip
    state = attend_blocks(
        state, queries, (lead, full), seen, pool, strides, lookup, numbers,
        False, CAPPED, FORMAT, BLOCK_N, K_DIM, V_DIM, BLOCK_K, BLOCK_V,
    )  # fmt: skip
    acc, total, top = attend_blocks(
        state, queries, (full, end), seen, pool, strides, lookup, numbers,
        True, CAPPED, FORMAT, BLOCK_N, K_DIM, V_DIM, BLOCK_K, BLOCK_V,
    )  # fmt: skip
    acc *= (v_factor / tl.where(total > 0, total, 1.0))[:, None]
    out_rows = out + token_at * out_stride + head * V_DIM
    tl.store(
        out_rows[:, None] + v_column[None, :],
        acc.to(out.dtype.element_ty),
        mask=live[:, None] & (v_column < V_DIM)[None, :],
    )
