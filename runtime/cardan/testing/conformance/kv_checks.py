"""The KV pool and the tables: bytes, zeros, slot 0, changes of the tables, reuse of rows and of slots.

It knows no layout inside a pool: what tables hold shows in what attention reads through them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from cardan.platform import OpsKVPool
from cardan.testing.conformance.attention_bench import Row
from cardan.testing.conformance.attention_checks import make_layer, pages, try_case
from cardan.testing.conformance.check import Check, expect
from cardan.testing.conformance.engine_run import Layout
from cardan.testing.conformance.kv_rounding import CODED
from cardan.testing.conformance.parity import run_layout
from cardan.testing.conformance.subject import Subject
from cardan.types import ForwardMode, KVLayout

SLOTS = 8192
"""Of a pool whose own arrays outweigh what a platform keeps beside them."""
SPARE_SHARE = 0.05


def checks(subject: Subject) -> Iterator[Check]:
    """Checks of the pool, and of its tables with each kind of page."""
    yield Check(part="kv", name="bytes-of-the-pool", run=_run_bytes)
    for kv_dtype in subject.capabilities.family("kv_dtype"):
        if kv_dtype in CODED:
            run = partial(_run_bytes, kv_dtype=kv_dtype)
            yield Check(part="kv", name=f"bytes-of-a-pool-of-{kv_dtype}", run=run)
    yield Check(part="kv", name="fresh-pool-is-zero-slot-0-too", run=_run_fresh)
    yield Check(part="kv", name="bind-takes-what-leaves-gave", run=_run_bind)
    yield Check(part="kv", name="slot-0-stays-finite-through-warm-up", run=_run_warm_up, needs_ops=False)
    for page in dict.fromkeys((min(subject.capabilities.page_sizes), *pages(subject)[:2])):
        for flat in (True, False):
            name = f"tables-beyond-one-page-of-{page}-{'flat' if flat else 'by-runs'}"
            yield Check(part="kv", name=name, run=partial(_run_tables, page=page, flat=flat))


def _layout(subject: Subject) -> KVLayout:
    layers = tuple(make_layer(index=index) for index in range(3))
    return KVLayout(layers=layers, page_size=min(subject.capabilities.page_sizes), dtype=subject.best_kv_dtype)


def _pool(subject: Subject, layout: KVLayout) -> tuple[OpsKVPool, int]:
    num_slots = -(-SLOTS // layout.page_size) * layout.page_size
    return subject.ops.allocate_kv(layout, num_slots, 4, 64), num_slots


def _run_bytes(subject: Subject, kv_dtype: str | None = None) -> None:
    layout = replace(_layout(subject), dtype=kv_dtype or subject.best_kv_dtype)
    pool, num_slots = _pool(subject, layout)
    least = num_slots * layout.bytes_per_slot
    expect(
        least <= pool.num_bytes <= least * (1 + SPARE_SHARE),
        f"a pool of {num_slots} slots of {layout.bytes_per_slot} bytes says it takes {pool.num_bytes}, "
        f"expected {least} and at most {SPARE_SHARE:.0%} more: memory is planned by slots",
    )


def _run_fresh(subject: Subject) -> None:
    """A pool in memory that held NaN before; allocators give out what was let go last."""
    device, layout = subject.ops, _layout(subject)
    with device.scope():
        shapes = [device.ops.to_host(leaf).shape for leaf in _pool(subject, layout)[0].leaves()]
        held = [device.ops.from_host(np.full(shape, np.nan, np.float32), layout.dtype) for shape in shapes]
        for array in held:
            device.ops.to_host(array)
        del held, array
        pool, _ = _pool(subject, layout)
        for index, leaf in enumerate(pool.leaves()):
            other = int((device.ops.to_host(leaf) != 0).sum())
            expect(
                other == 0,
                f"leaf {index} of a fresh pool holds {other} values that are not 0; padding reads slot 0, and a masked "
                "NaN still poisons a row: fill the pool with zeros",
            )


def _run_bind(subject: Subject) -> None:
    device, layout = subject.ops, _layout(subject)
    with device.scope():
        pool, _ = _pool(subject, layout)
        shapes = [device.ops.to_host(leaf).shape for leaf in pool.leaves()]
        expect(len(shapes) >= 6, f"a pool of 3 layers has {len(shapes)} leaves, expected keys and values of each")
        pool.bind(
            [
                device.ops.from_host(np.full(shape, index + 1.0, np.float32), layout.dtype)
                for index, shape in enumerate(shapes)
            ]
        )
        for index, (leaf, shape) in enumerate(zip(pool.leaves(), shapes, strict=True)):
            values = device.ops.to_host(leaf)
            expect(values.shape == shape, f"leaf {index} has the shape {values.shape} after bind, expected {shape}")
            expect(bool((values == index + 1).all()), f"leaf {index} does not hold what was bound in its place")


def _run_warm_up(subject: Subject) -> None:
    """Warm-up steps run over slot 0 only; what is generated after many of them is what is generated after none."""
    run_layout(subject, Layout(name="after-warm-up", warm_ups=3))


def _run_tables(subject: Subject, page: int, flat: bool) -> None:
    """Rows over scattered pages whose tables held other slots before, one page and several of them."""
    lengths = (1, page, page + 1, 2 * page + 3, 5 * page)
    rows = tuple(Row(length - 1, 1) for length in lengths)
    for backend in subject.capabilities.family("attention"):
        try_case(subject, backend, ForwardMode.DECODE, rows, make_layer(), page=page, flat=flat)
        longer = tuple(Row(length, 2 * page + 1) for length in (0, page, 3 * page))
        try_case(subject, backend, ForwardMode.EXTEND, longer, make_layer(), page=page, flat=flat)
