"""Attention of one new token a row, with the keys of each row split over the chip and put together by a second pass.

It knows no model. Keys and values of the new tokens are in the pool already.

Source: Dao et al., "Flash-Decoding for long-context inference", 2023: parts by the logarithm of their sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cardan.errors import UnsupportedError
from cardan_kernels.attention.arguments import SMALLEST_BLOCK, AttentionCall
from cardan_kernels.attention.scoring import Scoring
from cardan_kernels.attention.shape import decode_config
from cardan_kernels.attention.softmax import attend_blocks
from cardan_kernels.attention.splits import Splits
from cardan_kernels.launching import on_device_of
from cardan_kernels.paged import PagedKV
from cardan_kernels.tuning import KernelConfig

PARTS_AT_ONCE = 8
"""Parts that the second pass reads together; fixed, since the order of sums follows from it."""


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
        scratch: float32, contiguous, of at least ``scratch_size`` elements; layers may share it. None where that is 0.
    """

    splits: Splits
    scratch: torch.Tensor | None = None


def scratch_size(rows: int, q_heads: int, v_dim: int, splits: Splits) -> int:
    """Elements of float32 that ``decode`` needs beside its arguments; 0 where there is no second pass."""
    return rows * q_heads * splits.count * (v_dim + 1) if splits.reduced else 0


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

    Raises:
        UnsupportedError: types, widths or sizes of parts that the kernel does not take, or too little scratch.
    """
    call = AttentionCall.of(q, kv, scoring, out)
    config = decode_config(call.shape, call.chip)
    num_rows = rows.lengths.shape[0]
    if num_rows == 0:
        return call.out
    with on_device_of(q):
        if split.splits.reduced:
            parts, logs = _scratch(call, num_rows, split)
            _launch_parts(q, call, (rows, scoring, split.splits), config, (parts, logs))
            _reduce_kernel[(num_rows, call.shape.q_heads)](
                parts,
                logs,
                scoring.sinks,
                rows.tokens,
                call.out,
                call.out.stride(0),
                split.splits.count,
                PARTS=PARTS_AT_ONCE,
                V_DIM=call.shape.v_dim,
                BLOCK_V=call.constants["BLOCK_V"],
                num_warps=4 if call.constants["BLOCK_V"] > 64 else 2,
            )
        else:
            _launch_parts(q, call, (rows, scoring, split.splits), config, (call.out, None))
    return call.out


def _launch_parts(
    q: torch.Tensor,
    call: AttentionCall,
    how: tuple[DecodeRows, Scoring, Splits],
    config: KernelConfig,
    target: tuple[torch.Tensor, torch.Tensor | None],
) -> None:
    """The first pass, into parts and their logarithms, or into the result where rows are not split."""
    rows, scoring, splits = how
    shape = call.shape
    block_h = max(SMALLEST_BLOCK, min(config["block_h"], 1 << (shape.group - 1).bit_length()))
    head_tiles = -(-shape.group // block_h)
    grid = (rows.lengths.shape[0], shape.kv_heads * head_tiles, splits.count)
    _parts_kernel[grid](
        q,
        *call.pool,
        rows.lengths,
        rows.table_rows,
        rows.tokens,
        scoring.sinks,
        *target,
        *call.strides,
        *call.numbers,
        shape.group,
        head_tiles,
        shape.q_heads,
        _blocks_of_part(splits, config["block_n"]),
        BLOCK_H=block_h,
        BLOCK_N=config["block_n"],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **call.constants,
    )


def _blocks_of_part(splits: Splits, block_n: int) -> int:
    """Blocks of keys of a part of a fixed size; 0 splits each row evenly."""
    if splits.tokens is None:
        return 0
    if splits.tokens % block_n:
        raise UnsupportedError(
            f"parts of a fixed size must be whole blocks of {block_n} keys, got {splits.tokens}. Pass a multiple of it."
        )
    return splits.tokens // block_n


def _scratch(call: AttentionCall, rows: int, split: DecodeSplits) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts ``[rows, q_heads, count, v_dim]`` and their logarithms ``[rows, q_heads, count]``."""
    heads, width, count = call.shape.q_heads, call.shape.v_dim, split.splits.count
    wanted = scratch_size(rows, heads, width, split.splits)
    if split.scratch is None or split.scratch.numel() < wanted:
        got = 0 if split.scratch is None else split.scratch.numel()
        raise UnsupportedError(
            f"scratch of decode must have {wanted} elements for {rows} rows in {count} parts, got {got}. "
            "Allocate what scratch_size says."
        )
    logs = rows * heads * count
    return (
        split.scratch[logs:wanted].view(rows, heads, count, width),
        split.scratch[:logs].view(rows, heads, count),
    )


@triton.jit(do_not_specialize=["window", "page_shift", "group", "head_tiles", "q_heads", "blocks_of_part"])
def _parts_kernel(
    q, keys, values, table, lengths, table_rows, tokens, sinks, out, logs,
    q_token_stride, q_head_stride, k_slot_stride, k_head_stride, v_slot_stride, v_head_stride, line_stride, out_stride,
    factor, inside_cap, v_factor, window, page_shift, group, head_tiles, q_heads, blocks_of_part,
    CAPPED: tl.constexpr, FORMAT: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One part of one row's keys, for all query heads of a key head as far as they fit.

    Without ``logs`` it is the only part, and goes to the result; else sinks wait for the second pass.
    """
    row, part, count = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    length = tl.load(lengths + row)
    first_key = tl.maximum(length - window, 0)
    first_block, end_block = first_key // BLOCK_N, (length + BLOCK_N - 1) // BLOCK_N
    even = (end_block - first_block + count - 1) // count
    blocks = tl.where(blocks_of_part == 0, even, blocks_of_part)
    begin = first_block + part * blocks
    end = tl.minimum(begin + blocks, end_block)
    kv_head = (tl.program_id(1) // head_tiles).to(tl.int64)
    in_group = (tl.program_id(1) % head_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = in_group < group
    head = kv_head * group + in_group
    if logs is not None:
        at = (row.to(tl.int64) * q_heads + head) * count + part
        if begin >= end:
            tl.store(logs + at, tl.full([BLOCK_H], float("-inf"), tl.float32), mask=live)
            return
    token = row.to(tl.int64)
    if tokens is not None:
        token = tl.load(tokens + row).to(tl.int64)
    k_column, v_column = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    q_rows = q + token * q_token_stride + head * q_head_stride
    queries = tl.load(q_rows[:, None] + k_column[None, :], mask=live[:, None] & (k_column < K_DIM)[None, :], other=0.0)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    if logs is None:  # noqa: SIM102 (decided while compiling)
        if sinks is not None:
            top = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
            total += 1.0
    line = tl.load(table_rows + row).to(tl.int64)
    acc, total, top = attend_blocks(
        (tl.zeros([BLOCK_H, BLOCK_V], tl.float32), total, top),
        queries,
        (begin, end),
        (tl.full([BLOCK_H], 0, tl.int32) + length - 1, window, first_key, length),
        (keys + kv_head * k_head_stride, values + kv_head * v_head_stride),
        (k_slot_stride, v_slot_stride),
        (table + line * line_stride, page_shift),
        (factor, inside_cap),
        True, CAPPED, FORMAT, BLOCK_N, K_DIM, V_DIM, BLOCK_K, BLOCK_V,
    )  # fmt: skip
    some = tl.where(total == 0, 1.0, total)
    acc *= (v_factor / some)[:, None]
    places = out + token * out_stride + head * V_DIM
    if logs is not None:
        places = out + at * V_DIM
        tl.store(logs + at, top + tl.log2(some), mask=live)
    kept = live[:, None] & (v_column < V_DIM)[None, :]
    tl.store(places[:, None] + v_column[None, :], acc.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["count"])
def _reduce_kernel(
    parts, logs, sinks, tokens, out, out_stride, count,
    PARTS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Parts of one head of one row, weighed by their sums of exponentials.

    Parts without keys add exact zeros, so that how many of them follow changes no bit.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    first = (row * tl.num_programs(1) + head).to(tl.int64) * count
    number, column = tl.arange(0, PARTS), tl.arange(0, BLOCK_V)
    highest = tl.full([PARTS], float("-inf"), tl.float32)
    for start in range(0, count, PARTS):
        inside = start + number < count
        highest = tl.maximum(highest, tl.load(logs + first + start + number, mask=inside, other=float("-inf")))
    top = tl.max(highest, 0)
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp2(sink - top)
    acc = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, count, PARTS):
        inside = start + number < count
        weight = tl.exp2(tl.load(logs + first + start + number, mask=inside, other=float("-inf")) - top)
        places = (first + start + number)[:, None] * V_DIM + column[None, :]
        read = (weight > 0)[:, None] & (column < V_DIM)[None, :]
        acc += tl.sum(tl.load(parts + places, mask=read, other=0.0) * weight[:, None], 0)
        total += tl.sum(weight, 0)
    acc = acc / tl.where(total > 0, total, 1.0)
    token = row.to(tl.int64)
    if tokens is not None:
        token = tl.load(tokens + row).to(tl.int64)
    tl.store(out + token * out_stride + head * V_DIM + column, acc.to(out.dtype.element_ty), mask=column < V_DIM)
