"""Requests with random arrivals, lengths and aborts through tiny pools, in both loops, checked at every step.

20,000 of them with the slow tests, a quarter of that without.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest
from scheduler_harness import EOS, Harness, LogprobParams, PairStop, SamplingParams, settings

from cardan.scheduler import Request

REQUESTS_PER_RUN = 500
SOME_REQUESTS = 125

CROWDED: dict[str, Any] = {"num_slots": 384, "max_running_requests": 12, "schedule_conservativeness": 0.05}
"""Far more output than the pool holds is admitted, so that requests must be retracted."""

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "page-16": {"page_size": 16},
    "page-64": {"page_size": 64, "num_slots": 512},
    "mixed": {"enable_mixed_chunk": True, "chunked_prefill_size": 32},
    "mixed-page-16": {"enable_mixed_chunk": True, "chunked_prefill_size": 32, "page_size": 16},
    "mixed-page-64": {"enable_mixed_chunk": True, "page_size": 64, "num_slots": 512, "max_running_requests": 12},
    "tiny-chunks": {"chunked_prefill_size": 7, "num_slots": 160},
    "no-chunks": {"chunked_prefill_size": -1, "max_prefill_tokens": 70},
    "tiny-pool": {"num_slots": 128, "radix_eviction_policy": "mru"},
    "crowded": CROWDED,
    "crowded-page-16": {**CROWDED, "page_size": 16},
    "no-cache": {**CROWDED, "disable_radix_cache": True},
    "no-cache-page-16": {**CROWDED, "disable_radix_cache": True, "page_size": 16, "enable_mixed_chunk": True},
    "lpm": {"schedule_policy": "lpm", "radix_eviction_policy": "lfu"},
    "dfs-weight": {"schedule_policy": "dfs-weight", "radix_eviction_policy": "slru"},
    "lof": {"schedule_policy": "lof", "radix_eviction_policy": "fifo"},
    "hrrn": {"schedule_policy": "hrrn", "radix_eviction_policy": "tlru", "prefill_decode_interval": 3},
    "shortest": {"schedule_policy": "shortest-prefill-first", "page_size": 16, "prefill_decode_interval": 1},
    "random": {"schedule_policy": "random", "max_running_requests": 3, "num_groups": 2},
    "priority": {
        "schedule_policy": "priority",
        "enable_priority_scheduling": True,
        "max_running_requests": 4,
        "radix_eviction_policy": "priority",
    },
    "priority-mixed": {
        **CROWDED,
        "enable_priority_scheduling": True,
        "enable_mixed_chunk": True,
        "schedule_policy": "routing-key",
        "page_size": 16,
    },
}


class Workload:
    """Random requests, many of which share a prefix."""

    def __init__(self, seed: int, outputs: tuple[int, ...]) -> None:
        self.outputs = outputs
        self.rng = random.Random(seed)
        self.prefixes = [[self.rng.randrange(97) for _ in range(60)] for _ in range(4)]

    def request(self, number: int, longest: int) -> Request:
        rng = self.rng
        prompt = rng.choice(self.prefixes)[: rng.choice((0, 5, 33, 48, 60))]
        prompt = (prompt + [rng.randrange(97) for _ in range(rng.choice((1, 2, 9, 25)))])[:longest]
        has_stop = rng.random() < 0.2
        return Request(
            rid=f"r{number}",
            prompt_ids=prompt,
            params=SamplingParams(
                max_new_tokens=rng.choice(self.outputs),
                min_new_tokens=rng.choice((0, 0, 4)),
                stop=("x",) if has_stop else (),
                stop_token_ids=rng.choice(((), (7, 11))),
                ignore_eos=rng.random() < 0.3,
                frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
                seed=rng.choice((None, None, 3)),
            ),
            logprobs=LogprobParams(
                output=rng.random() < 0.1,
                prompt_start=rng.choice((None,) * 9 + (rng.randrange(len(prompt) + 1),)),
            ),
            stop=PairStop() if has_stop else None,
            priority=rng.choice((0, 5, 20, 40)),
            cache_salt=rng.choice((None, None, None, "salt")),
            routing_key=rng.choice((None, "a", "b")),
            eos_ids=frozenset({EOS}),
        )


def simulate(config: dict[str, Any], overlap: bool, seed: int, num_requests: int = REQUESTS_PER_RUN) -> Harness:
    harness = Harness(settings(**config), overlap, failure_rate=700, full_check_every=16)
    crowded = harness.settings.schedule_conservativeness < 1
    workload = Workload(seed, (5, 30, 50) if crowded else (0, 1, 2, 5, 12, 40))
    rng = random.Random(seed + 1)
    longest = harness.settings.max_input_tokens
    added = 0
    while added < num_requests or harness.scheduler.has_work:
        if added < num_requests and rng.random() < 0.5:
            for _ in range(min(rng.choice((1, 1, 2, 6)), num_requests - added)):
                harness.add(workload.request(added, longest))
                added += 1
        if rng.random() < 0.02 and harness.scheduler.has_requests:
            harness.scheduler.abort(rng.choice(list(harness.scheduler._state.open)))
        if crowded and rng.random() < 0.3:
            harness.scheduler._state.ratio.value = 0.0
        worked = harness.turn()
        assert worked or not harness.scheduler.has_work, "the scheduler has work and does nothing"
    return harness


@pytest.mark.parametrize("num_requests", [SOME_REQUESTS, pytest.param(REQUESTS_PER_RUN, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
def test_both_loops_give_each_request_what_it_would_get_alone(
    name: str, num_requests: int, simulation_totals: Counter[str]
) -> None:
    started_s, started_cpu_s = time.perf_counter(), time.thread_time()
    seed = 1000 + list(CONFIGS).index(name)
    runs = [simulate(CONFIGS[name], overlap, seed, num_requests) for overlap in (False, True)]
    for harness in runs:
        harness.check_outputs()
        simulation_totals.update(harness.scheduler.stats().totals)
        simulation_totals["steps"] += len(harness.steps)
        harness.check_nothing_left()
    plain, overlapped = runs
    for rid in plain.requests:
        shared = min(len(plain.tokens[rid]), len(overlapped.tokens[rid]))
        assert plain.tokens[rid][:shared] == overlapped.tokens[rid][:shared]
    simulation_totals["cpu_ms"] += int((time.thread_time() - started_cpu_s) * 1000)
    simulation_totals["wall_ms"] += int((time.perf_counter() - started_s) * 1000)


def test_the_simulation_covers_what_it_is_for() -> None:
    """Retractions, preemptions, drained steps and dropped tokens do happen, so the runs above mean something."""
    totals: Counter[str] = Counter()
    for name in ("priority-mixed", "crowded"):
        totals.update(simulate(CONFIGS[name], overlap=True, seed=7).scheduler.stats().totals)
    for counter in ("retractions", "preemptions", "dropped_tokens", "aborted_requests", "failed_requests", "deferrals"):
        assert totals[counter] > 0, counter
