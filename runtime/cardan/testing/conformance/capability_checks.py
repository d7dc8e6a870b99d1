"""Honest capabilities: every feature is answered, what is claimed is there, what is not is refused with a reason.

It knows no platform. Numbers are other parts' business; here only yes and no are compared with what is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from cardan.errors import CardanError
from cardan.platform import PLATFORM_API, AttentionMeta, CapturedStep, Feature, LinearSpec, OpsDevice, Support
from cardan.platform.resolve import RECOMMENDABLE
from cardan.testing.conformance.attention_checks import make_layer
from cardan.testing.conformance.check import Check, CheckError, expect
from cardan.testing.conformance.engine_run import tiny
from cardan.testing.conformance.linear_checks import claiming
from cardan.testing.conformance.refusal_checks import refusal_checks
from cardan.testing.conformance.subject import Subject
from cardan.types import ForwardMode, KVLayout

GRAPH_ROWS = (1, 2, 4)
FAMILIES = ("dtype", "kv_dtype", "attention", "weights", "quantize")
"""Families of capabilities whose members must each have an implementation."""


def checks(subject: Subject) -> Iterator[Check]:
    """Checks of the answers themselves, of each claim, and of each refusal."""
    yield _check("probe-and-api-range-let-it-run", _run_probe)
    yield _check("every-feature-is-answered", _run_answers)
    yield _check("every-unsupported-feature-has-a-reason", _run_reasons)
    yield _check("types-and-pages-are-named", _run_families)
    yield _check("recommendations-may-be-made", _run_recommendations)
    yield _check("options-are-well-formed", _run_options)
    if subject.platform.tuner(subject.info) is not None:
        yield _check("tuning-is-well-formed", _run_tuning)
    for feature in subject.capabilities.features:
        family, _, member = str(feature).partition(":")
        if member and family in FAMILIES and _needs_implementation(subject, family, str(feature)):
            run = partial(_run_claim, family=family, member=member)
            yield Check(part="capabilities", name=f"{feature}-has-an-implementation", run=run)
    if subject.capabilities.supports(Feature.GRAPH):
        yield Check(part="capabilities", name="graph-has-an-implementation", run=_run_graph)
    yield from refusal_checks(subject)


def _check(name: str, run: Any) -> Check:
    return Check(part="capabilities", name=name, run=run, needs_ops=False)


def _needs_implementation(subject: Subject, family: str, feature: str) -> bool:
    """Whether a claim must be there; a weight format that is emulated is widened by the loader."""
    support = subject.capabilities.get(feature).support
    return support is Support.NATIVE or (support is Support.EMULATED and family != "weights")


def _run_probe(subject: Subject) -> None:
    found = subject.platform.probe()
    expect(found.usable, f"probe() says that the platform cannot run here, where it has a device: {found.reason}")
    expect(bool(found.reason.strip()), "probe() gives no reason, which `cardan platforms` shows")
    oldest, newest = subject.platform.api_range
    expect(
        oldest <= PLATFORM_API <= newest,
        f"api_range is {oldest} to {newest}, but it was tried with PLATFORM_API {PLATFORM_API}",
    )


def _run_answers(subject: Subject) -> None:
    missing = [
        str(feature) for feature in Feature if str(feature) not in {str(k) for k in subject.capabilities.features}
    ]
    expect(not missing, f"the platform does not mention {', '.join(missing)}; answer each, unsupported with a reason")


def _run_reasons(subject: Subject) -> None:
    for feature, answer in subject.capabilities.features.items():
        if answer.support is Support.UNSUPPORTED:
            expect(bool(answer.reason.strip()), f"{feature} is unsupported, and no reason says why")


def _run_families(subject: Subject) -> None:
    capabilities = subject.capabilities
    for family in ("dtype", "kv_dtype"):
        expect(bool(capabilities.family(family)), f"no {family}:NAME is supported, so no model can run")
    pages = capabilities.page_sizes
    expect(bool(pages) and all(size >= 1 for size in pages), f"page_sizes are {pages}, expected positive sizes")
    expect(len(set(pages)) == len(pages), f"page_sizes are {pages}, some of them twice")


def _run_recommendations(subject: Subject) -> None:
    facts = tiny(subject).model.facts
    given = dict(subject.platform.recommend(facts, subject.info))
    unknown = sorted(set(given) - RECOMMENDABLE)
    expect(not unknown, f"the platform recommends {', '.join(unknown)}, which no platform may")
    silent = [name for name, recommendation in given.items() if not recommendation.why]
    expect(not silent, f"recommendations of {', '.join(silent)} do not say why")


def _run_options(subject: Subject) -> None:
    names = [spec.name for spec in subject.platform.options()]
    expect(len(set(names)) == len(names), f"options {names} have names twice")
    for spec in subject.platform.options():
        right = isinstance(spec.default, spec.kind) and (not spec.choices or spec.default in spec.choices)
        expect(right, f"option {spec.name}: the default {spec.default!r} is no {spec.kind.__name__} among its choices")
        expect(bool(spec.help), f"option {spec.name} has no help")


def _run_tuning(subject: Subject) -> None:
    tuner = subject.platform.tuner(subject.info)
    assert tuner is not None
    named = bool(tuner.processor.strip()) and bool(tuner.kernels.strip())
    expect(named, "the tuner does not say for which processor and kernels measurements hold")
    tunables = tuner.tunables()
    names = [tunable.name for tunable in tunables]
    expect(bool(names) and len(set(names)) == len(names), f"tunables are {names}, expected some, each name once")
    for tunable in tunables:
        bounds = f"{tunable.least} to {tunable.most}"
        expect(
            tunable.least <= tunable.default <= tunable.most,
            f"tunable {tunable.name}: the default {tunable.default} is not within {bounds}",
        )
        expect(bool(tunable.help), f"tunable {tunable.name} has no help")
    tuned = subject.platform.tuned({tunable.name: tunable.default for tunable in tunables})
    expect(tuned is not subject.platform, "tuned() returns the platform itself, so that no table has an effect")
    expect(tuned.name == subject.platform.name, f"tuned() returns another platform, {tuned.name}")


def _run_claim(subject: Subject, family: str, member: str) -> None:
    device = subject.ops
    with device.scope():
        if family == "dtype":
            _claim_dtype(device, member)
        elif family == "kv_dtype":
            _claim_kv_dtype(subject, member)
        elif family == "attention":
            _claim_attention(subject, member)
        elif family == "weights":
            _claim_weights(subject, member)
        else:
            spec = LinearSpec(name="w", out_features=32, in_features=256, dtype=subject.best_dtype, quantize=member)
            claiming(device, "F32", spec)


def _claim_dtype(device: OpsDevice, dtype: str) -> None:
    ops = device.ops
    there = ops.cast(ops.from_host(np.array([[1.0, -2.5]], np.float32), dtype), dtype)
    back = ops.to_host(ops.add(there, there))
    expect(np.allclose(back, [[2.0, -5.0]]), f"dtype:{dtype} is claimed, but 1 + 1 and -2.5 - 2.5 give {back}")


def _claim_kv_dtype(subject: Subject, dtype: str) -> None:
    layout = KVLayout(layers=(make_layer(),), page_size=min(subject.capabilities.page_sizes), dtype=dtype)
    pool = subject.ops.allocate_kv(layout, 8 * layout.page_size, 2, 16)
    expect(pool.num_bytes > 0, f"kv_dtype:{dtype} is claimed, but a pool of it has {pool.num_bytes} bytes")


def _claim_attention(subject: Subject, name: str) -> None:
    for page in subject.capabilities.page_sizes:
        layout = KVLayout(layers=(make_layer(),), page_size=page, dtype=subject.best_kv_dtype)
        pool = subject.ops.allocate_kv(layout, 4 * page, 2, 16)
        made = subject.ops.attention(name, pool, layout, subject.best_dtype)
        expect(made is not None, f"attention:{name} is claimed for pages of {page}, but the device makes none")


def _claim_weights(subject: Subject, fmt: str) -> None:
    spec = LinearSpec(name="w", out_features=64, in_features=256, dtype=subject.best_dtype)
    claiming(subject.ops, fmt, spec)


def _run_graph(subject: Subject) -> None:
    device = subject.ops
    names = subject.capabilities.family("attention")
    layout = KVLayout(
        layers=(make_layer(),), page_size=min(subject.capabilities.page_sizes), dtype=subject.best_kv_dtype
    )
    pool = device.allocate_kv(layout, 64 * layout.page_size, 4, 32)
    step: CapturedStep = lambda ids, positions, plan: ids  # noqa: E731 - a step that does nothing
    try:
        runner = device.graph_runner(pool, device.attention(names[0], pool, layout, subject.best_dtype), step)
    except CardanError as error:
        raise CheckError(f"graph is claimed, but the device makes no graph runner: {error}") from error
    if runner is None:
        raise CheckError("graph is claimed, but the device has no graph runner")
    fits = [rows for rows in GRAPH_ROWS if runner.can_replay(_decode_meta(rows))]
    expect(bool(fits), f"graph is claimed, but no decode step of {', '.join(map(str, GRAPH_ROWS))} rows is replayed")


def _decode_meta(count: int) -> AttentionMeta:
    rows = np.arange(count, dtype=np.int32)
    return AttentionMeta(
        mode=ForwardMode.DECODE,
        query_starts=np.arange(count + 1, dtype=np.int32),
        seq_lens=np.ones(count, np.int32),
        row_ids=rows,
        positions=np.zeros(count, np.int32),
        out_slots=rows[None] + 1,
    )
