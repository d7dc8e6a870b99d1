from __future__ import annotations

from collections.abc import Mapping

import pytest
from scheduler_harness import Harness, request, settings

from cardan.cache import RadixTree
from cardan.scheduler import SCHEDULE_POLICIES, FallbackLogged, OrderingContext, Request
from cardan.scheduler.ordering import CACHE_AWARE_LIMIT


def order(policy: str, requests: list[Request], now_s: float = 0.0, keys: Mapping[str, int] | None = None) -> list[str]:
    import random

    tree = RadixTree(1)
    for tokens in (list(range(30)), list(range(10)) + [50] * 10):
        one = request("cached", tokens)
        tree.insert(one.prompt, one.prompt + 100, None)
    context = OrderingContext(cache=tree, now_s=now_s, rng=random.Random(3), routing_keys=keys or {})
    for one in requests:
        one.max_new_tokens = one.params.max_new_tokens
    return [one.rid for one in SCHEDULE_POLICIES[policy].order(requests, context)]


def test_fcfs_keeps_the_order() -> None:
    assert order("fcfs", [request("b"), request("a")]) == ["b", "a"]


def test_lpm_takes_the_longest_cached_prefix_first() -> None:
    requests = [request("none", [90, 91]), request("ten", [*range(10), 9]), request("all", [*range(30), 1])]
    assert order("lpm", requests) == ["all", "ten", "none"]


def test_dfs_weight_takes_the_branch_with_the_most_requests_and_keeps_it_together() -> None:
    requests = [
        request("x1", [*range(10), 50, 50, 1]),
        request("y1", [*range(30), 1]),
        request("none", [90]),
        request("y2", [*range(30), 2]),
        request("x2", [*range(10), 50, 50, 2]),
        request("y3", [*range(30), 3]),
    ]
    assert order("dfs-weight", requests) == ["y1", "y2", "y3", "x1", "x2", "none"]


def test_lof_takes_the_longest_output_first() -> None:
    assert order("lof", [request("a", max_new=2), request("b", max_new=9)]) == ["b", "a"]


def test_hrrn_lets_short_ones_go_early_and_long_ones_not_starve() -> None:
    young = [request("long", 10, max_new=100, arrival_s=0.0), request("short", 10, max_new=2, arrival_s=0.0)]
    assert order("hrrn", young, now_s=1.0) == ["short", "long"]
    old = [request("long", 10, max_new=100, arrival_s=0.0), request("short", 10, max_new=2, arrival_s=99.9)]
    assert order("hrrn", old, now_s=100.0) == ["long", "short"]


def test_shortest_prefill_first_counts_uncached_tokens_only() -> None:
    assert order("shortest-prefill-first", [request("five", 5), request("cached", [*range(30), 1])]) == [
        "cached",
        "five",
    ]
    many = [request(f"r{n}", 5) for n in range(CACHE_AWARE_LIMIT)] + [request("cached", [*range(30), 1])]
    assert order("shortest-prefill-first", many)[-1] == "cached"


def test_random_shuffles() -> None:
    rids = [f"r{n}" for n in range(20)]
    shuffled = order("random", [request(rid) for rid in rids])
    assert shuffled != rids
    assert sorted(shuffled) == sorted(rids)


def test_priority_takes_the_highest_first_and_ties_in_order() -> None:
    requests = [request("a", priority=1), request("b", priority=3), request("c", priority=3)]
    assert order("priority", requests) == ["b", "c", "a"]


def test_routing_key_keeps_keys_together_busiest_first() -> None:
    requests = [request(f"{key}{n}", routing_key=key) for n, key in enumerate(("x", None, "y", "x", "z"))]
    assert order("routing-key", requests, keys={"y": 5, "x": 1}) == ["y2", "x0", "x3", "z4", "None1"]


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_cache_aware_policies_run_as_fcfs_with_a_long_queue_and_say_so_once(policy: str) -> None:
    harness = Harness(settings(schedule_policy=policy, max_running_requests=2), full_check_every=1000)
    harness.add(request("warm", list(range(40)), max_new=1))
    harness.run()
    harness.scheduler.take_events()
    harness.add(*(request(f"r{n}", 5, max_new=1) for n in range(CACHE_AWARE_LIMIT)))
    harness.add(request("cached", list(range(40)), max_new=1))
    step = harness.plan()
    assert [extend.request.rid for extend in step.extends] == ["r0", "r1"]
    harness.commit()
    harness.run()
    reason = f"fallback:{policy} ran as fcfs, more than 128 waiting"
    assert harness.scheduler.stats().totals[reason] >= 1
    said = [event for event in harness.scheduler.take_events() if isinstance(event, FallbackLogged)]
    assert [event.describe() for event in said] == [f"Fallback: {reason[9:]} (logged once, counted in the metrics)"]
    assert harness.ends["cached"].queue_s < harness.ends[f"r{CACHE_AWARE_LIMIT - 1}"].queue_s, "lpm came back"


@pytest.mark.parametrize("policy", ["fcfs", "lof", "random"])
def test_with_priority_scheduling_priority_comes_before_the_policy(policy: str) -> None:
    harness = Harness(settings(schedule_policy=policy, enable_priority_scheduling=True, max_running_requests=1))
    harness.add(request("low", max_new=9), request("high", max_new=2, priority=9))
    assert harness.plan().rids == ["high"]


def preempting(difference: int, overlap: bool = False) -> Harness:
    harness = Harness(settings(enable_priority_scheduling=True, max_running_requests=2), overlap=overlap)
    harness.add(request("old", 12, max_new=30), request("new", 12, max_new=30))
    for _ in range(4):
        harness.turn()
    harness.add(request("urgent", 12, max_new=3, priority=difference))
    return harness


@pytest.mark.parametrize("overlap", [False, True])
def test_a_difference_above_the_threshold_preempts_the_newest_of_the_lowest(overlap: bool) -> None:
    harness = preempting(11, overlap)
    harness.run()
    harness.check_outputs()
    assert harness.requests["new"].num_retractions == 1
    assert harness.requests["old"].num_retractions == 0
    assert harness.scheduler.stats().totals["preemptions"] == 1
    assert harness.first_token_s["urgent"] < 0.1
    harness.check_nothing_left()


def test_a_difference_of_the_threshold_itself_does_not() -> None:
    harness = preempting(10)
    harness.run()
    assert harness.scheduler.stats().totals.get("preemptions", 0) == 0


def test_no_one_is_preempted_when_that_would_not_be_enough() -> None:
    harness = Harness(settings(enable_priority_scheduling=True, num_slots=100))
    harness.add(request("low", 10, max_new=5, priority=0), request("high", 40, max_new=30, priority=50))
    harness.turn()
    harness.turn()
    harness.add(request("urgent", 60, max_new=30, priority=50))
    harness.turn()
    assert harness.scheduler.stats().totals.get("preemptions", 0) == 0
    harness.run()
    harness.check_outputs()
