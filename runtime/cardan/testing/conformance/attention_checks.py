"""Attention of every backend against dense attention in float64.

It knows no backend; which kinds of layers are tried follows from what the platform claims.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from cardan.ops.definitions import NumpyArray
from cardan.ops.rounding import ROUNDOFF
from cardan.platform import Feature
from cardan.testing.conformance.attention_bench import AttentionBench, Case, Row
from cardan.testing.conformance.check import Check, NotApplicableError, expect
from cardan.testing.conformance.kv_rounding import CODED
from cardan.testing.conformance.subject import Subject
from cardan.types import ForwardMode, KVKind, LayerKV

DECODE = tuple(Row(length - 1, 1) for length in (1, 2, 17, 64, 300, 299, 151, 65))
PREFILL = (Row(0, 1), Row(0, 33), Row(100, 20), Row(63, 65), Row(0, 130), Row(255, 2))
MIXED = (Row(0, 40), Row(55, 1), Row(64, 64), Row(300, 1), Row(1, 1))
BATCHES: Mapping[str, tuple[ForwardMode, tuple[Row, ...]]] = {
    "decode": (ForwardMode.DECODE, DECODE),
    "prefill": (ForwardMode.EXTEND, PREFILL),
    "mixed": (ForwardMode.MIXED, MIXED),
}

KINDS: Mapping[str, dict[str, Any]] = {
    "grouped": {},
    "one-to-one": {"q_heads": 3, "kv_heads": 3},
    "one-key-head": {"q_heads": 5, "kv_heads": 1, "k_dim": 8, "v_dim": 8},
    "eight-to-one": {"q_heads": 8, "kv_heads": 1, "k_dim": 64, "v_dim": 64, "scale": 0.125},
    "heads-of-80": {"q_heads": 2, "kv_heads": 1, "k_dim": 80, "v_dim": 80, "scale": 0.11},
    "heads-of-128": {"q_heads": 2, "kv_heads": 2, "k_dim": 128, "v_dim": 128, "scale": 0.09},
    "heads-of-256": {"q_heads": 2, "kv_heads": 1, "k_dim": 256, "v_dim": 256, "scale": 0.0625},
    "wide-values": {"k_dim": 8, "v_dim": 24},
    "window": {"window": 37, "kind": KVKind.SLIDING},
    "window-of-one": {"window": 1, "kind": KVKind.SLIDING},
    "softcap": {"softcap": 2.0},
    "softcap-window": {"softcap": 2.0, "window": 50, "kind": KVKind.SLIDING},
    "sinks": {"sinks": True},
}
QUICK_KINDS = ("grouped", "one-key-head", "eight-to-one", "window", "softcap-window", "sinks")
SCALED: Mapping[str, Any] = {"scale": 0.25 / 5e4, "k_scale": 5e4, "v_scale": 3e-7}
"""Keys larger than floats of 8 bits get, and values smaller, but for the layer's scales of them."""
NARROW_KINDS = ("grouped", "softcap-window")
CODED_KINDS = ("grouped", "heads-of-80", "softcap-window", "sinks", "scaled")
QUICK_CODED_KINDS = ("grouped", "scaled")


def make_layer(**changes: Any) -> LayerKV:
    """A small layer with grouped heads."""
    sizes: dict[str, Any] = {"index": 0, "q_heads": 6, "kv_heads": 2, "k_dim": 16, "v_dim": 16, "scale": 0.25}
    return LayerKV(**{**sizes, **changes})


def checks(subject: Subject) -> Iterator[Check]:
    """Checks of every backend that the platform claims."""
    for backend in subject.capabilities.family("attention"):
        for kind in QUICK_KINDS if subject.quick else KINDS:
            for batch in BATCHES:
                yield _check(backend, f"{batch}-{kind}", {"kind": kind, "batch": batch})
        yield from _narrow_checks(subject, backend)
        for page in pages(subject):
            for batch in BATCHES:
                yield _check(backend, f"{batch}-pages-of-{page}", {"batch": batch, "page": page})
        yield Check(part="attention", name=f"{backend}/layers-in-two-groups", run=partial(_run_groups, backend=backend))
        yield Check(part="attention", name=f"{backend}/shared-prefixes", run=partial(_run_shared, backend=backend))
        for batch in ("decode", "prefill"):
            run = partial(_run_long, backend=backend, batch=batch)
            yield Check(part="attention", name=f"{backend}/{batch}-lengths-up-to-{_longest(subject)}", run=run)


def _narrow_checks(subject: Subject, backend: str) -> Iterator[Check]:
    """Other types of activations, and of the pool."""
    for dtype in subject.dtypes()[1:]:
        for kind in NARROW_KINDS:
            for batch in BATCHES:
                yield _check(backend, f"{batch}-{kind}[{dtype}]", {"kind": kind, "batch": batch, "dtype": dtype})
    for kv_dtype in subject.capabilities.family("kv_dtype"):
        if kv_dtype in CODED:
            yield from _coded_checks(subject, backend, kv_dtype)
        elif kv_dtype not in ROUNDOFF:
            run = partial(_run_unknown, kv_dtype=kv_dtype)
            yield Check(part="attention", name=f"{backend}/over-{kv_dtype}-kv", run=run)
    for kv_dtype in subject.dtypes("kv_dtype"):
        for batch in ("decode", "prefill"):
            yield _check(backend, f"{batch}-over-{kv_dtype}-kv", {"batch": batch, "kv_dtype": kv_dtype})
    if any(kv_dtype in CODED for kv_dtype in subject.capabilities.family("kv_dtype")):
        # scales are for floats of 8 bits alone
        yield _check(backend, f"decode-scaled-over-{subject.best_kv_dtype}-kv", {"batch": "decode", "kind": "scaled"})


def _coded_checks(subject: Subject, backend: str, kv_dtype: str) -> Iterator[Check]:
    """A pool that keeps less than was written, within half a step of each value."""
    for kind in QUICK_CODED_KINDS if subject.quick else CODED_KINDS:
        for batch in BATCHES:
            settings = {"batch": batch, "kind": kind, "kv_dtype": kv_dtype}
            yield _check(backend, f"{batch}-{kind}-over-{kv_dtype}-kv", settings)
    run = partial(_run_shared, backend=backend, kv_dtype=kv_dtype)
    yield Check(part="attention", name=f"{backend}/shared-prefixes-over-{kv_dtype}-kv", run=run)


def _run_unknown(subject: Subject, kv_dtype: str) -> None:
    raise NotApplicableError(f"the references do not know how {kv_dtype} rounds, so what is kept in it is not compared")


def pages(subject: Subject) -> tuple[int, ...]:
    """Claimed page sizes above 1; in a quick run the smallest, the middle and the largest."""
    claimed = sorted(size for size in subject.capabilities.page_sizes if size > 1)
    if subject.quick and len(claimed) > 3:
        return claimed[0], claimed[len(claimed) // 2], claimed[-1]
    return tuple(claimed)


def _longest(subject: Subject) -> int:
    return 600 if subject.quick else 4096


def _check(backend: str, name: str, settings: dict[str, Any]) -> Check:
    return Check(part="attention", name=f"{backend}/{name}", run=partial(_run, backend=backend, settings=settings))


def _needs(subject: Subject, layer: LayerKV, mode: ForwardMode) -> None:
    """Skip what the platform does not claim; that it is refused is checked elsewhere."""
    wanted = {
        Feature.SLIDING_WINDOW: layer.window is not None,
        Feature.ATTENTION_SOFTCAP: layer.softcap is not None,
        Feature.ATTENTION_SINKS: layer.sinks,
        Feature.MIXED_BATCH: mode is ForwardMode.MIXED,
    }
    subject.needs(*(feature for feature, needed in wanted.items() if needed))


def _run(subject: Subject, backend: str, settings: dict[str, Any]) -> None:
    mode, rows = BATCHES[settings["batch"]]
    kind = settings.get("kind", "grouped")
    layer = make_layer(**(SCALED if kind == "scaled" else KINDS[kind]))
    try_case(subject, backend, mode, rows, layer, **{k: v for k, v in settings.items() if k not in ("batch", "kind")})


def try_case(
    subject: Subject, backend: str, mode: ForwardMode, rows: tuple[Row, ...], layer: LayerKV, **changes: Any
) -> None:
    """Run one step and compare it."""
    _needs(subject, layer, mode)
    dtype = changes.pop("dtype", subject.best_dtype)
    page = changes.pop("page", min(subject.capabilities.page_sizes))
    kv_dtype = changes.pop("kv_dtype", dtype if dtype in subject.dtypes("kv_dtype") else subject.best_kv_dtype)
    case = Case(mode=mode, rows=rows, layer=layer, dtype=dtype, kv_dtype=kv_dtype, page=page, **changes)
    sinks = np.linspace(-1.0, 4.0, layer.q_heads) if layer.sinks else None
    bench = AttentionBench(subject.ops, backend, case, sinks=sinks)
    got, want = bench.run()
    hold(got, want, bench.allowed, f"attention {backend!r}, {mode.value}, pages of {page}")


def hold(got: NumpyArray, want: NumpyArray, allowed: NumpyArray, what: str) -> None:
    """Compare results ``[tokens, features]``.

    Raises:
        CheckError: shapes differ, rows hold NaN, or one is off by more than is allowed.
    """
    expect(got.shape == want.shape, f"{what}: the shape is {list(got.shape)}, expected {list(want.shape)}")
    broken = int((~np.isfinite(got)).any(axis=-1).sum())
    expect(broken == 0, f"{what}: {broken} of {len(got)} rows hold NaN")
    excess = (np.abs(got - want) / allowed).max(axis=-1)
    worst = int(excess.argmax())
    expect(excess[worst] <= 1, f"{what}: row {worst} is off by {excess[worst]:.3g} times what rounding explains")


def _run_shared(subject: Subject, backend: str, **changes: Any) -> None:
    page = sorted(subject.capabilities.page_sizes)[min(2, len(subject.capabilities.page_sizes) - 1)]
    prefix = -(-40 // page) * page
    rows = (Row(prefix + 9, 1), *(Row(prefix + extra, 1, shares=0, shared=prefix) for extra in (0, 3, 70)))
    try_case(subject, backend, ForwardMode.DECODE, rows, make_layer(), page=page, **changes)
    rows = (Row(prefix, 5), Row(prefix + 2, 30, shares=0, shared=prefix))
    try_case(subject, backend, ForwardMode.EXTEND, rows, make_layer(), page=page, **changes)


def _run_groups(subject: Subject, backend: str) -> None:
    """Three layers, the second of which has slots of its own; each is told apart by its keys and values."""
    for mode, rows in (BATCHES["prefill"], BATCHES["decode"]):
        try_case(subject, backend, mode, rows, make_layer(), grouped=True)
    page = max(pages(subject)[:1], default=1)
    try_case(subject, backend, ForwardMode.DECODE, DECODE, make_layer(), grouped=True, page=page)


def _run_long(subject: Subject, backend: str, batch: str) -> None:
    longest = _longest(subject)
    layer = make_layer(q_heads=2, kv_heads=1)
    if batch == "decode":
        lengths = [n for n in (1, 2, 63, 64, 65, 127, 600, 1025, 2047, 4096) if n <= longest]
        try_case(subject, backend, ForwardMode.DECODE, tuple(Row(n - 1, 1) for n in lengths), layer)
        return
    rows = (Row(0, longest // 4), Row(longest - 100, 100), Row(longest // 2, 65))
    try_case(subject, backend, ForwardMode.EXTEND, rows, layer)
