"""Attention of the native kernels against torch's on the CPU: the same pools, tables and steps, one layer at a time.

It needs torch and cardan-native. Times are medians of milliseconds for one layer. ``--cpu`` counts the time of the
process, for machines where others compute as well; with one thread that is what a quiet machine would take.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import cardan_native
from cardan.platform import AttentionMeta
from cardan.types import ForwardMode, KVLayout, LayerKV, TableDelta
from cardan_cpu.native_attention import NativeAttention
from cardan_cpu.native_kv_pool import NativeKVPool
from cardan_torch import TorchAttention, TorchKVPool

SHAPES = {"9 heads, 3 kv, 64": (9, 3, 64), "16 heads, 8 kv, 128": (16, 8, 128)}
CACHE_BYTES = 64 * 2**20
"""Layers take turns until their pools are this large together, so that a step does not find its own keys in a cache."""


@dataclass(frozen=True, slots=True)
class Step:
    """What is timed: ``rows`` rows of ``new`` tokens each over ``cached`` ones; ``shared`` of those are the same."""

    name: str
    rows: int
    cached: int
    new: int
    shared: int = 0


STEPS = (
    *(Step(f"decode {rows} x {length}", rows, length - 1, 1) for length in (512, 4096) for rows in (1, 8, 32)),
    Step("decode 32 x 4096, 4000 shared", 32, 4095, 1, shared=4000),
    Step("prefill 512", 1, 0, 512),
    Step("prefill 512 over 4096", 1, 4096, 512),
)


@dataclass(frozen=True, slots=True)
class Bench:
    """A step over pools of several layers."""

    layers: tuple[LayerKV, ...]
    layout: KVLayout
    meta: AttentionMeta
    tables: tuple[TableDelta, ...]
    num_slots: int
    max_length: int
    arrays: tuple[np.ndarray[Any, Any], ...]
    page: int

    def native(self, variant: str, dtype: str) -> Callable[[int], None]:
        """One layer's attention with the native kernels."""
        kernels = cardan_native.load(variant)
        pool = NativeKVPool(kernels, self.layout, self.num_slots, len(self.tables) + 1, self.max_length)
        pool.update_tables(self.tables)
        backend = NativeAttention(pool)
        plan = backend.plan(self.meta)
        q, k, v = (kernels.Tensor.from_bits(_bits(x, dtype), dtype) for x in self.arrays)
        _fill([leaf.bits() for leaf in pool.leaves()], self.layout.dtype)
        return lambda turn: backend.forward(q, k, v, self.layers[turn], plan)

    def torch(self, dtype: str) -> Callable[[int], None]:
        """The same with torch."""
        pool = TorchKVPool(self.layout, self.num_slots, len(self.tables) + 1, self.max_length, torch.device("cpu"))
        pool.update_tables(self.tables)
        backend = TorchAttention(pool)
        plan = backend.plan(self.meta)
        q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in self.arrays)
        narrow = self.layout.dtype != "float32"
        _fill([(x.view(torch.uint16) if narrow else x).numpy() for x in pool.leaves()], self.layout.dtype)
        return lambda turn: backend.forward(q, k, v, self.layers[turn], plan)


def make_bench(step: Step, shape: tuple[int, int, int], dtype: str, page: int) -> Bench:
    """Random queries, and sequences on pages in random order."""
    q_heads, kv_heads, dim = shape
    rng = np.random.default_rng(0)
    length = step.cached + step.new
    pages = -(-length // page)
    num_slots = (1 + step.rows * pages) * page
    free = rng.permutation(np.arange(1, 1 + step.rows * pages, dtype=np.int32))
    slots = (free.reshape(step.rows, pages, 1) * page + np.arange(page, dtype=np.int32)).reshape(step.rows, -1)[
        :, :length
    ]
    slots[:, : step.shared] = slots[0, : step.shared]
    layer_bytes = num_slots * kv_heads * dim * 2 * (4 if dtype == "float32" else 2)
    layers = tuple(
        LayerKV(index=i, q_heads=q_heads, kv_heads=kv_heads, k_dim=dim, v_dim=dim, scale=dim**-0.5)
        for i in range(1 + CACHE_BYTES // layer_bytes if step.new == 1 else 1)
    )
    return Bench(
        layers=layers,
        layout=KVLayout(layers=layers, page_size=page, dtype=dtype),
        meta=AttentionMeta(
            mode=ForwardMode.DECODE if step.new == 1 else ForwardMode.EXTEND,
            query_starts=np.arange(step.rows + 1, dtype=np.int32) * step.new,
            seq_lens=np.full(step.rows, length, np.int32),
            row_ids=np.arange(1, step.rows + 1, dtype=np.int32),
            positions=np.tile(np.arange(step.cached, length, dtype=np.int32), step.rows),
            out_slots=slots[:, step.cached :].reshape(1, -1),
        ),
        tables=tuple(TableDelta(row_id=row + 1, start=0, slots=slots[row][None]) for row in range(step.rows)),
        num_slots=num_slots,
        max_length=length,
        arrays=tuple(
            rng.standard_normal((step.rows * step.new, heads, dim)).astype(np.float32)
            for heads in (q_heads, kv_heads, kv_heads)
        ),
        page=page,
    )


def median_ms(run: Callable[[int], Any], turns: int, arguments: argparse.Namespace) -> float:
    """Median time of a call; layers take turns."""
    clock = time.process_time if arguments.cpu else time.perf_counter
    run(0)
    times: list[float] = []
    begin = clock()
    while len(times) < 5 or clock() - begin < arguments.budget:
        start = clock()
        run(len(times) % turns)
        times.append(clock() - start)
    return statistics.median(times) * 1000


def measure(arguments: argparse.Namespace) -> Iterator[str]:
    """A line of the table for each shape and step."""
    yield f"| {arguments.dtype}, pages of {arguments.page} | torch ms | native ms | torch / native |\n"
    yield "|---|---|---|---|\n"
    for shape_name, shape in SHAPES.items():
        for step in STEPS:
            if arguments.only not in step.name:
                continue
            bench = make_bench(step, shape, arguments.dtype, arguments.page)
            turns = len(bench.layers)
            native = median_ms(bench.native(arguments.variant, arguments.dtype), turns, arguments)
            other = float("nan") if arguments.no_torch else median_ms(bench.torch(arguments.dtype), turns, arguments)
            yield f"| {shape_name}: {step.name} | {other:.3f} | {native:.3f} | {other / native:.2f} |\n"


def _bits(x: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "float32":
        return x
    if dtype == "float16":
        return x.astype(np.float16).view(np.uint16)
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def _fill(leaves: list[np.ndarray[Any, Any]], dtype: str) -> None:
    """Random finite numbers."""
    rng = np.random.default_rng(1)
    for leaf in leaves:
        leaf[:] = _bits(rng.standard_normal(leaf.shape, dtype=np.float32), dtype)


def main() -> None:
    """Write the table to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variant", default=cardan_native.chosen())
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for each measurement")
    parser.add_argument("--only", default="", help="steps whose name contains this")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="count the CPU time of all threads instead of the clock")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cardan_native.load(arguments.variant).set_threads(arguments.threads)
    with torch.inference_mode():
        for line in measure(arguments):
            sys.stdout.write(line)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
