"""``npu_fused_infer_attention_score`` as documented for Atlas A2 and A3.

Sources: op-plugin, docs/context/torch_npu-npu_fused_infer_attention_score.md; CANN 8.5 and 9.0,
aclnnFusedInferAttentionScoreV3. Where a page says two things of an argument, both hold. Simulated are the layouts TND
over paged keys and values, and BSND of one query a row. What else the call takes, the simulator refuses to guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from torch_npu import _tensor
from torch_npu._memory import allocation_of
from torch_npu._refusal import refuse, require, require_dtype

FUNCTION = "npu_fused_infer_attention_score"
MASK_SIDE = 2048
MOST_ROWS = 4096
MOST_TOKENS = 1 << 20
MOST_ELEMENTS = 2**31 - 1
LONG_BLOCK = 128
"""Blocks are multiples of it where a row has several queries."""
MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)
ALL_TOKENS = 2147483647


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a call, by the names of the documentation."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    atten_mask: torch.Tensor | None
    actual_seq_lengths: Sequence[int] | None
    actual_seq_lengths_kv: Sequence[int] | None
    block_table: torch.Tensor | None
    num_heads: int
    kv_heads: int
    scale: float
    pre_tokens: int
    next_tokens: int
    input_layout: str
    sparse_mode: int
    block_size: int
    inner_precise: int


def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries over keys and values; returns the result and, where it is asked for, sums of exponents."""
    result: tuple[torch.Tensor, torch.Tensor] = _tensor.call(
        _attend,
        (query, key, value),
        {
            "atten_mask": atten_mask,
            "actual_seq_lengths": actual_seq_lengths,
            "actual_seq_lengths_kv": actual_seq_lengths_kv,
            "block_table": block_table,
            "num_heads": num_heads,
            "scale": scale,
            "pre_tokens": pre_tokens,
            "next_tokens": next_tokens,
            "input_layout": input_layout,
            "num_key_value_heads": num_key_value_heads,
            "sparse_mode": sparse_mode,
            "inner_precise": inner_precise,
            "block_size": block_size,
            "softmax_lse_flag": softmax_lse_flag,
        },
    )
    return result


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> tuple[torch.Tensor, ...]:
    require(given["inner_precise"] in (0, 1), FUNCTION, "inner_precise must be 0 or 1")
    require(not given.pop("softmax_lse_flag"), FUNCTION, "the simulator has no softmax_lse")
    kv_heads = given.pop("num_key_value_heads") or given["num_heads"]
    call = Call(query, key, value, kv_heads=kv_heads, **given)
    _check_common(call)
    if call.input_layout == "TND":
        _check_tokens(call)
        out = _by_tokens(call)
    elif call.input_layout == "BSND":
        _check_single(call)
        out = _single(call)
    else:
        refuse(FUNCTION, f"the simulator knows input_layout TND and BSND, got {call.input_layout!r}")
    return out, torch.zeros(1, dtype=torch.float32)


_attend.__name__ = FUNCTION


def _check_common(call: Call) -> None:
    for name in ("query", "key", "value"):
        tensor = getattr(call, name)
        require_dtype(tensor, (torch.float16, torch.bfloat16), FUNCTION, name)
        require(tensor.dtype == call.query.dtype, FUNCTION, f"{name} must have the type of query")
        require(tensor.is_contiguous(), FUNCTION, f"{name} must be contiguous")
    require(call.key.shape == call.value.shape, FUNCTION, "key and value must have the same shape over pages")
    require(
        call.num_heads % call.kv_heads == 0 and call.num_heads // call.kv_heads <= 64,
        FUNCTION,
        f"num_heads must be a multiple of num_key_value_heads, at most 64 times, got {call.num_heads}, {call.kv_heads}",
    )
    require(call.num_heads <= 256, FUNCTION, f"num_heads must be at most 256, got {call.num_heads}")
    require(call.query.shape[-2] == call.num_heads, FUNCTION, "query must have num_heads heads")
    _check_pages(call)


def _check_pages(call: Call) -> None:
    """Page attention: caches ``[blocks, block_size, heads * dim]`` and a table of block numbers."""
    require(call.block_table is not None, FUNCTION, "the simulator knows paged keys and values only: pass block_table")
    assert call.block_table is not None
    require_dtype(call.block_table, (torch.int32,), FUNCTION, "block_table")
    require(call.block_table.dim() == 2, FUNCTION, "block_table must have two dimensions")
    require(call.key.dim() == 3, FUNCTION, "key and value must be [blocknum, blocksize, H] over pages")
    width = call.kv_heads * call.query.shape[-1]
    require(
        call.key.shape[2] == width and width <= 65535,
        FUNCTION,
        f"H must be num_key_value_heads * D = {width}, at most 65535, got {call.key.shape[2]}",
    )
    require(
        call.key.shape[1] == call.block_size,
        FUNCTION,
        f"block_size must be that of the cache, {call.key.shape[1]}, got {call.block_size}",
    )
    require(call.block_size % 16 == 0, FUNCTION, f"block_size must be a multiple of 16, got {call.block_size}")
    held = call.key.numel()
    require(held <= MOST_ELEMENTS, FUNCTION, f"key and value must have at most {MOST_ELEMENTS} elements, got {held}")


def _check_blocks(call: Call, lengths: Sequence[int]) -> None:
    """Every length must be covered by blocks that exist."""
    table = call.block_table
    assert table is not None
    require(
        table.shape[0] == len(lengths), FUNCTION, f"block_table must have {len(lengths)} rows, got {table.shape[0]}"
    )
    needed = [-(-length // call.block_size) for length in lengths]
    require(table.shape[1] >= max(needed), FUNCTION, f"block_table must have {max(needed)} columns at least")
    require(min(lengths) >= 0, FUNCTION, "actual_seq_lengths_kv must not be negative")
    require(
        call.key.shape[0] >= sum(needed),
        FUNCTION,
        f"the cache must have as many blocks as all rows together, {sum(needed)}, got {call.key.shape[0]}",
    )
    for row, count in enumerate(needed):
        blocks = table[row, :count]
        if count and (int(blocks.min()) < 0 or int(blocks.max()) >= call.key.shape[0]):
            refuse(FUNCTION, f"block_table names blocks outside of the {call.key.shape[0]} of the cache")


def _check_tokens(call: Call) -> None:
    """TND, of which the documentation asks more."""
    query = call.query
    require(query.dim() == 3, FUNCTION, "query must be [T, N, D] in layout TND")
    queries, keys = call.actual_seq_lengths, call.actual_seq_lengths_kv
    if queries is None or keys is None:
        refuse(FUNCTION, "layout TND needs actual_seq_lengths and actual_seq_lengths_kv")
    require(1 <= len(queries) <= MOST_ROWS, FUNCTION, f"the batch must be 1 to {MOST_ROWS}, got {len(queries)}")
    require(len(queries) == len(keys), FUNCTION, "actual_seq_lengths and actual_seq_lengths_kv must be equally many")
    require(query.shape[0] <= MOST_TOKENS, FUNCTION, f"T must be at most {MOST_TOKENS}")
    ordered = all(a <= b for a, b in pairwise(queries))
    require(ordered, FUNCTION, "actual_seq_lengths must be cumulative in layout TND")
    require(queries[-1] == query.shape[0], FUNCTION, f"the last of actual_seq_lengths must be T, {query.shape[0]}")
    dim = query.shape[2]
    require(dim % 16 == 0 and dim <= 256, FUNCTION, f"D must be a multiple of 16 up to 256 in layout TND, got {dim}")
    require(call.block_size <= 128, FUNCTION, f"block_size must be at most 128 in layout TND, got {call.block_size}")
    several = max(_counts(queries)) > 1
    require(
        not several or call.block_size % LONG_BLOCK == 0,
        FUNCTION,
        f"block_size must be a multiple of {LONG_BLOCK} where a row has several queries, got {call.block_size}",
    )
    precise = query.dtype == torch.float16 and call.num_heads == call.kv_heads
    require(
        call.inner_precise == 0 or precise,
        FUNCTION,
        "inner_precise must be 0 in layout TND, but for float16 and as many heads of keys as of queries",
    )
    _check_sparse(call)
    _check_blocks(call, keys)
    if call.sparse_mode == 3:
        for rows, (count, length) in enumerate(zip(_counts(queries), keys, strict=True)):
            require(
                count < length, FUNCTION, f"sparse_mode 3 needs less queries than keys; row {rows}: {count}, {length}"
            )


def _check_sparse(call: Call) -> None:
    mode, mask = call.sparse_mode, call.atten_mask
    require(mode in (0, 3, 4), FUNCTION, f"sparse_mode must be 0, 3 or 4 in layout TND, got {mode}")
    if mode == 0:
        require(mask is None, FUNCTION, "sparse_mode 0 takes no atten_mask in layout TND")
        return
    if mask is None:
        refuse(FUNCTION, f"sparse_mode {mode} needs an atten_mask")
    _check_mask(mask)
    require(
        tuple(mask.shape[-2:]) == (MASK_SIDE, MASK_SIDE) and mask.numel() == MASK_SIDE**2,
        FUNCTION,
        f"atten_mask must be [{MASK_SIDE}, {MASK_SIDE}] with sparse_mode {mode}, got {list(mask.shape)}",
    )
    held = allocation_of(mask.untyped_storage().data_ptr(), mask.untyped_storage().nbytes())
    if not held.verified_mask:
        wanted = torch.ones((MASK_SIDE, MASK_SIDE), dtype=torch.bool).triu(1)
        require(
            torch.equal(mask.reshape(MASK_SIDE, MASK_SIDE).bool(), wanted),
            FUNCTION,
            f"atten_mask must be a lower triangle with sparse_mode {mode}: 1 above the diagonal, where it hides",
        )
        held.verified_mask = True
    if mode == 4:
        require(call.pre_tokens + call.next_tokens >= 0, FUNCTION, "pre_tokens + next_tokens must not be negative")
        assert call.actual_seq_lengths is not None
        assert call.actual_seq_lengths_kv is not None
        within = call.pre_tokens >= -min(_counts(call.actual_seq_lengths))
        require(within, FUNCTION, "pre_tokens must not be below minus the queries of a row")
        within = call.next_tokens >= -min(call.actual_seq_lengths_kv)
        require(within, FUNCTION, "next_tokens must not be below minus the keys of a row")


def _check_mask(mask: torch.Tensor) -> None:
    require_dtype(mask, MASK_DTYPES, FUNCTION, "atten_mask")
    require(mask.is_contiguous(), FUNCTION, "atten_mask must be contiguous")


def _check_single(call: Call) -> None:
    """One query a row; sparse_mode, pre_tokens and next_tokens are then of no effect."""
    query = call.query
    require(query.dim() == 4, FUNCTION, "query must be [B, S, N, D] in layout BSND")
    if query.shape[1] != 1:
        refuse(FUNCTION, f"the simulator knows layout BSND of one query a row, got {query.shape[1]}")
    require(query.shape[3] <= 512, FUNCTION, f"D must be at most 512, got {query.shape[3]}")
    require(query.shape[3] % 16 == 0, FUNCTION, f"D must be a multiple of 16, got {query.shape[3]}")
    require(call.block_size <= 512, FUNCTION, f"block_size must be at most 512, got {call.block_size}")
    lengths, table, mask = call.actual_seq_lengths_kv, call.block_table, call.atten_mask
    if lengths is None:
        refuse(FUNCTION, "page attention needs actual_seq_lengths_kv")
    require(len(lengths) == query.shape[0], FUNCTION, "actual_seq_lengths_kv must have a length for each row")
    _check_blocks(call, lengths)
    if mask is None:
        return
    assert table is not None
    _check_mask(mask)
    width = table.shape[1] * call.block_size
    shapes = ((query.shape[0], width), (query.shape[0], 1, width), (query.shape[0], 1, 1, width))
    require(
        tuple(mask.shape) in shapes,
        FUNCTION,
        f"atten_mask must be one of {', '.join(str(list(shape)) for shape in shapes)}, got {list(mask.shape)}",
    )


def _counts(cumulative: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in zip((0, *cumulative), cumulative, strict=False)]


def _row_cache(call: Call, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a row in float32: ``[kv_heads, length, D]``."""
    assert call.block_table is not None
    blocks = call.block_table[row, : -(-length // call.block_size)].long()
    dim = call.query.shape[-1]
    keys, values = (
        cache.index_select(0, blocks).view(-1, call.kv_heads, dim)[:length].float().transpose(0, 1)
        for cache in (call.key, call.value)
    )
    return keys, values


def _by_tokens(call: Call) -> torch.Tensor:
    out = torch.zeros_like(call.query)
    assert call.actual_seq_lengths is not None
    assert call.actual_seq_lengths_kv is not None
    start = 0
    for row, stop in enumerate(call.actual_seq_lengths):
        length = call.actual_seq_lengths_kv[row]
        if stop > start and length > 0:
            hidden = _hidden(call, stop - start, length)
            out[start:stop] = _weigh(call, call.query[start:stop], row, length, hidden)
        start = stop
    return out


def _hidden(call: Call, queries: int, keys: int) -> torch.Tensor | None:
    """What a mask of ``sparse_mode`` hides, aligned at the last query and key: bool ``[queries, keys]``."""
    if call.sparse_mode == 0:
        return None
    ahead = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    if call.sparse_mode == 3:
        return ahead > 0
    return (ahead > call.next_tokens) | (-ahead > call.pre_tokens)


def _weigh(call: Call, query: torch.Tensor, row: int, length: int, hidden: torch.Tensor | None) -> torch.Tensor:
    """Attention of ``query: [n, heads, D]`` of one row, in float32."""
    keys, values = _row_cache(call, row, length)
    out = functional.scaled_dot_product_attention(
        query.float().transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=None if hidden is None else ~hidden[None, None],
        scale=call.scale,
        enable_gqa=call.num_heads != call.kv_heads,
    )
    return out[0].transpose(0, 1).to(query.dtype)


def _single(call: Call) -> torch.Tensor:
    out = torch.zeros_like(call.query)
    assert call.actual_seq_lengths_kv is not None
    for row, length in enumerate(call.actual_seq_lengths_kv):
        if length == 0:
            continue
        hidden = None
        if call.atten_mask is not None:
            hidden = call.atten_mask.reshape(call.query.shape[0], -1)[row, :length].bool()[None]
        out[row] = _weigh(call, call.query[row], row, length, hidden)
    return out
