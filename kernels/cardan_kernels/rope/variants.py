"""Variants of rotations and of writes into a pool.

It compiles nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from cardan_kernels.chips import chip
from cardan_kernels.compiled.variant import Variant, empty
from cardan_kernels.paged import PagedKV
from cardan_kernels.rope.rotation import Rotation, rope, rope_and_write_kv, write_kv

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WIDTHS = (64, 80, 96, 128, 256)
TOKENS, Q_HEADS, KV_HEADS, SLOTS = 64, 32, 8, 4096


def variants(name: str) -> tuple[Variant, ...]:
    """Variants for one chip."""
    return tuple(_variants(chip(name).float8 or torch.float8_e4m3fn))


def _variants(e4m3: torch.dtype) -> Iterator[Variant]:
    pools = {"own": None, "fp8_e4m3": e4m3, "fp8_e5m2": torch.float8_e5m2}
    for dtype, width in itertools.product(DTYPES, WIDTHS):
        named = {"dtype": dtype, "head": f"head {width}"}
        turns = tuple(itertools.product(("halves", "neighbours"), ("all", "part")))
        for pairs, rotated in turns:
            turned = named | {"pairs": pairs, "rotated": f"{rotated} rotated"}
            yield Variant("rope", turned, _Run(DTYPES[dtype], width, None, (pairs, rotated)).rope)
        for pool, stored in pools.items():
            kept = named | {"kv": f"kv {pool}"}
            yield Variant("write_kv", kept, _Run(DTYPES[dtype], width, stored, ("", "")).write)
            for pairs, rotated in turns:
                run = _Run(DTYPES[dtype], width, stored, (pairs, rotated)).both
                yield Variant("rope_and_write_kv", kept | {"pairs": pairs, "rotated": f"{rotated} rotated"}, run)


class _Run:
    """Calls of one variant."""

    def __init__(self, dtype: torch.dtype, width: int, stored: torch.dtype | None, turn: tuple[str, str]) -> None:
        self.dtype, self.width, self.stored = dtype, width, stored or dtype
        self.interleaved, self.half = turn[0] == "neighbours", width // 2 if turn[1] == "all" else width // 4

    def rope(self) -> object:
        return rope(self._heads(Q_HEADS), empty((TOKENS,), torch.int32), self._rotation())

    def write(self) -> object:
        keys = self._heads(KV_HEADS)
        write_kv(keys, keys, self._kv(), empty((TOKENS,), torch.int64))
        return None

    def both(self) -> object:
        qkv = (self._heads(Q_HEADS), self._heads(KV_HEADS), self._heads(KV_HEADS))
        positions, slots = empty((TOKENS,), torch.int32), empty((TOKENS,), torch.int64)
        return rope_and_write_kv(qkv, positions, self._rotation(), self._kv(), slots)

    def _heads(self, heads: int) -> torch.Tensor:
        return empty((TOKENS, heads, self.width), self.dtype)

    def _rotation(self) -> Rotation:
        table = empty((SLOTS, self.half), torch.float32)
        return Rotation(table, table, self.interleaved)

    def _kv(self) -> PagedKV:
        pool = empty((SLOTS, KV_HEADS, self.width), self.stored)
        return PagedKV(pool, pool, empty((TOKENS, SLOTS), torch.int32))
