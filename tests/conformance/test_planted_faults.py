"""Faults planted one at a time into copies of the CPU platform: each is found, and named for its place."""

from __future__ import annotations

from dataclasses import dataclass, field

import faulty_platforms as faulty
import pytest

from cardan.platform import Capability
from cardan.testing.conformance import PARTS, Status, Subject, run_suite
from cardan_cpu.cpu_platform import CpuPlatform

pytestmark = pytest.mark.slow

PARTS_TRIED = tuple(part for part in PARTS if part != "end_to_end")


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        platform: a copy of the CPU platform that has it.
        found_by: checks that must fail.
        places: beginnings of the checks that may fail: all others must pass.
    """

    platform: CpuPlatform
    found_by: tuple[str, ...]
    places: tuple[str, ...]
    parts: tuple[str, ...] = field(default=PARTS_TRIED)


GRAPH: dict[str, Capability] = dict(faulty.GRAPH)

FAULTS = {
    "rope-off-by-one": Fault(
        faulty.CpuCopy(faulty.with_ops(faulty.RopeOffByOne)), ("ops/rope[float32]",), ("ops/rope",)
    ),
    "rope-applied-twice": Fault(
        faulty.CpuCopy(faulty.with_ops(faulty.RopeTwice)),
        ("ops/rope[float32]", "ops/rope_apply[float32]"),
        ("ops/rope", "kv/slot-0-stays-finite-through-warm-up"),
    ),
    "page-table-wrong-beyond-one-page": Fault(
        faulty.CpuCopy(faulty.with_pool(faulty.OnePagePool)),
        ("kv/tables-beyond-one-page-of-2-flat", "attention/torch/decode-pages-of-256"),
        ("kv/tables-beyond-one-page-of-", "attention/torch/"),
    ),
    "nan-leak-at-inner-size-modulo-32": Fault(
        faulty.CpuCopy(faulty.LeakyDevice),
        ("linear/padding-of-inner-sizes", "ops/linear[float32]"),
        ("linear/", "ops/linear", "kv/slot-0-stays-finite-through-warm-up"),
    ),
    "sampler-ignores-top-p": Fault(
        faulty.CpuCopy(faulty.with_sampling(faulty.no_top_p)),
        ("sampler/top_p-takes-the-reference-token", "sampler/tiny-top_p-takes-the-reference-token"),
        ("sampler/",),
    ),
    "penalties-ignored": Fault(
        faulty.CpuCopy(faulty.with_sampling(faulty.no_penalties)), ("sampler/penalties",), ("sampler/penalties",)
    ),
    "claimed-without-an-implementation": Fault(
        faulty.CpuCopy(faulty.OneThread, {"weights:Q8_0": faulty.NATIVE}),
        ("capabilities/weights:Q8_0-has-an-implementation",),
        ("capabilities/weights:Q8_0", "linear/Q8_0"),
    ),
    "pool-floor-above-the-budget": Fault(
        faulty.CpuCopy(faulty.FloorDevice), ("memory/no-memory-is-an-error-not-a-floor",), ("memory/",)
    ),
    "slot-0-left-with-nan": Fault(
        faulty.CpuCopy(faulty.with_pool(faulty.NanInSlotZero)),
        ("kv/fresh-pool-is-zero-slot-0-too",),
        ("kv/", "attention/torch/"),
    ),
    "graph-replays-stale-lengths": Fault(
        faulty.CpuCopy(faulty.with_graph(stale=True), GRAPH),
        ("graph/replay-equals-eager-LlamaForCausalLM",),
        ("graph/replay-equals-eager-",),
    ),
    "graph-that-never-replays": Fault(
        faulty.CpuCopy(faulty.with_graph(stale=False, make=faulty.ShyGraph), GRAPH),
        ("graph/replay-equals-eager-LlamaForCausalLM", "capabilities/graph-has-an-implementation"),
        ("graph/replay-equals-eager-", "capabilities/graph-"),
        ("graph", "capabilities"),
    ),
    "linear-that-refuses-499-columns": Fault(
        faulty.CpuCopy(faulty.with_linear(faulty.OddLinear)),
        ("sampler/greedy-takes-the-reference-token", "sampler/penalties"),
        ("sampler/",),
        ("linear", "sampler"),
    ),
    "last-of-2048-columns-dropped": Fault(
        faulty.CpuCopy(faulty.with_linear(faulty.dropping(1))),
        ("linear/F32[float32]", "linear/BF16[bfloat16]", "linear/F16[float16]", "ops/linear[float32]"),
        ("linear/", "ops/linear"),
        ("linear", "ops"),
    ),
    "last-four-of-2048-columns-dropped": Fault(
        faulty.CpuCopy(faulty.with_linear(faulty.dropping(4))),
        ("linear/F32[float32]", "linear/BF16[bfloat16]", "linear/F32[float16]", "ops/linear[bfloat16]"),
        ("linear/", "ops/linear"),
        ("linear", "ops"),
    ),
    "scores-a-thousandth-too-large": Fault(
        faulty.CpuCopy(faulty.WarmDevice),
        (
            "attention/torch/decode-grouped",
            "attention/torch/prefill-window",
        ),
        ("attention/torch/",),
        ("attention",),
    ),
    "one-table-for-all-groups": Fault(
        faulty.CpuCopy(faulty.with_pool(faulty.OneGroupPool)),
        ("attention/torch/layers-in-two-groups",),
        ("attention/torch/layers-in-two-groups",),
        ("attention",),
    ),
    "pool-that-is-not-zero": Fault(
        faulty.CpuCopy(faulty.with_pool(faulty.UnzeroedPool)),
        ("kv/fresh-pool-is-zero-slot-0-too",),
        ("kv/fresh-pool-is-zero-slot-0-too",),
        ("kv",),
    ),
    "bind-that-does-nothing": Fault(
        faulty.CpuCopy(faulty.with_pool(faulty.BoundToItself)),
        ("kv/bind-takes-what-leaves-gave",),
        ("kv/bind-takes-what-leaves-gave",),
        ("kv",),
    ),
    "ten-times-the-bytes": Fault(
        faulty.CpuCopy(faulty.with_pool(faulty.BoastfulPool)),
        ("kv/bytes-of-the-pool", "kv/bytes-of-a-pool-of-fp8_e4m3"),
        ("kv/bytes-of-the-pool", "kv/bytes-of-a-pool-of-"),
        ("kv",),
    ),
    "policy-that-refuses-what-is-shared": Fault(
        faulty.CpuCopy(faulty.TimidDevice),
        (
            "memory/shared-memory-keeps-head-room",
            "memory/more-memory-never-gives-less",
            "memory/unknown-memory-is-an-error-that-names-the-flag",
        ),
        ("memory/",),
        ("memory",),
    ),
    "rope-twice-in-narrow-types": Fault(
        faulty.CpuCopy(faulty.with_ops(faulty.NarrowRopeTwice)),
        ("end_to_end/parity-LlamaForCausalLM[bfloat16]", "end_to_end/chunked[bfloat16]"),
        ("end_to_end/parity-LlamaForCausalLM[", "end_to_end/chunked["),
        ("end_to_end/parity-LlamaForCausalLM", "end_to_end/chunked", "end_to_end/cold"),
    ),
    "noise-that-depends-on-the-company": Fault(
        faulty.CpuCopy(faulty.with_sampling(faulty.seeds_by_company)),
        ("end_to_end/field-seed", "end_to_end/field-temperature"),
        ("end_to_end/field-", "end_to_end/fields-"),
        ("end_to_end/field", "end_to_end/cold"),
    ),
    "given-logits-ignored": Fault(
        faulty.CpuCopy(faulty.with_runner(faulty.DeafRunner)),
        ("sampler/logits-on-the-host",),
        ("sampler/logits-on-the-host",),
        ("sampler",),
    ),
    "hidden-states-of-the-tokens-behind": Fault(
        faulty.CpuCopy(faulty.with_runner(faulty.LateStates)),
        ("end_to_end/hidden-states",),
        ("end_to_end/hidden-states",),
        ("end_to_end/hidden-states", "end_to_end/pooled", "end_to_end/prompts-of-vectors"),
    ),
    "attention-that-refuses-two-layers": Fault(
        faulty.CpuCopy(faulty.OneLayerDevice),
        ("kv/slot-0-stays-finite-through-warm-up",),
        ("kv/slot-0-stays-finite-through-warm-up",),
        ("kv",),
    ),
}


def failures(platform: CpuPlatform, parts: tuple[str, ...]) -> dict[str, str]:
    with Subject(platform, quick=True) as subject:
        report = run_suite(subject, parts)
    assert report.of(Status.PASSED)
    return {outcome.id: outcome.detail for outcome in report.of(Status.FAILED)}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_where_it_is(name: str) -> None:
    fault = FAULTS[name]
    failed = failures(fault.platform, fault.parts)
    assert set(fault.found_by) <= set(failed), sorted(failed)
    elsewhere = {check: detail for check, detail in failed.items() if not check.startswith(fault.places)}
    assert not elsewhere
    assert all(failed.values()), "a failure says what was got and what was expected"


@pytest.mark.parametrize(
    ("platform", "parts"),
    [
        pytest.param(faulty.CpuCopy(faulty.OneThread), PARTS_TRIED, id="plain"),
        pytest.param(faulty.CpuCopy(faulty.with_graph(stale=False), GRAPH), ("graph", "capabilities"), id="graphs"),
    ],
)
def test_without_a_fault_everything_passes(platform: CpuPlatform, parts: tuple[str, ...]) -> None:
    assert failures(platform, parts) == {}
