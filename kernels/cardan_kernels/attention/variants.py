"""Variants of attention kernels: types, widths of heads, and what scores go through.

It compiles nothing. Page sizes, windows, groups of heads and numbers of parts are given at run time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from cardan_kernels.attention.decode import DecodeRows, DecodeSplits, decode, scratch_size
from cardan_kernels.attention.prefill import prefill
from cardan_kernels.attention.scoring import Scoring
from cardan_kernels.attention.splits import Splits
from cardan_kernels.attention.tiles import TILE_FIELDS
from cardan_kernels.chips import chip
from cardan_kernels.compiled.variant import Variant, empty
from cardan_kernels.paged import PagedKV

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WIDTHS = (64, 80, 96, 128, 256)
KV_HEADS, GROUP, TOKENS, SLOTS = 8, 4, 64, 4096
WIDEST_IN_REGISTERS = {"gfx1100": 128}
"""Heads that prefill keeps in registers, where that is not all: wider ones spill there and run slowly."""


def variants(name: str) -> tuple[Variant, ...]:
    """Variants for one chip."""
    return tuple(_variants(chip(name).float8 or torch.float8_e4m3fn, WIDEST_IN_REGISTERS.get(name, max(WIDTHS))))


def _variants(e4m3: torch.dtype, widest: int) -> Iterator[Variant]:
    pools = {"own": None, "fp8_e4m3": e4m3, "fp8_e5m2": torch.float8_e5m2}
    runs = {"attention_prefill": {"": _prefill}, "attention_decode": {"whole": _whole, "split": _split}}
    features = itertools.product(DTYPES, pools, WIDTHS, ("", "softcap"), ("", "sinks"), ("pages", "slots"))
    for dtype, pool, width, softcap, sinks, table in features:
        step = _Step(DTYPES[dtype], pools[pool] or DTYPES[dtype], width, bool(softcap), bool(sinks), table)
        named = {
            "dtype": dtype,
            "kv": f"kv {pool}",
            "head": f"head {width}",
            "softcap": softcap or "plain",
            "sinks": sinks or "no sinks",
            "table": f"table of {table}",
        }
        for op, ways in runs.items():
            for way, run in ways.items():
                fits = op == "attention_decode" or width <= widest
                yield Variant(op, named | ({"rows": way} if way else {}), step.bound(run), default=fits)


@dataclass(frozen=True, slots=True)
class _Step:
    """Arguments of one variant, made when it is run."""

    dtype: torch.dtype
    pool: torch.dtype
    width: int
    softcap: bool
    sinks: bool
    table: str

    def bound(self, run: Callable[[_Step], object]) -> Callable[[], object]:
        return lambda: run(self)

    @property
    def q(self) -> torch.Tensor:
        return empty((TOKENS, KV_HEADS * GROUP, self.width), self.dtype)

    @property
    def kv(self) -> PagedKV:
        keys = empty((SLOTS, KV_HEADS, self.width), self.pool)
        of_slots = self.table == "slots"
        return PagedKV(
            keys, keys, empty((TOKENS, SLOTS), torch.int64 if of_slots else torch.int32), 1 if of_slots else 16
        )

    @property
    def scoring(self) -> Scoring:
        sinks = empty((KV_HEADS * GROUP,), torch.float32) if self.sinks else None
        return Scoring(0.125, softcap=50.0 if self.softcap else None, sinks=sinks)


def _prefill(step: _Step) -> object:
    return prefill(step.q, step.kv, empty((TOKENS, TILE_FIELDS), torch.int32), step.scoring)


def _whole(step: _Step) -> object:
    return _decode(step, Splits(1))


def _split(step: _Step) -> object:
    return _decode(step, Splits(8))


def _decode(step: _Step, splits: Splits) -> object:
    rows = DecodeRows(empty((TOKENS,), torch.int32), empty((TOKENS,), torch.int32))
    size = scratch_size(TOKENS, KV_HEADS * GROUP, step.width, splits)
    scratch = empty((size,), torch.float32) if size else None
    return decode(step.q, step.kv, rows, step.scoring, DecodeSplits(splits, scratch))
