from __future__ import annotations

import pytest
from scheduler_harness import Harness, SamplingParams, request, settings

from cardan.types import ForwardMode


def rids_of(step) -> list[str]:  # type: ignore[no-untyped-def]
    return [extend.request.rid for extend in step.extends]


@pytest.mark.parametrize(("pool", "admitted"), [(61, ["big"]), (62, ["big", "next"])])
def test_a_candidate_must_leave_strictly_more_than_its_price(pool: int, admitted: list[str]) -> None:
    """The first is charged what it was priced, 9 + 20 + 1; the second costs 10 + 20 + 1."""
    harness = Harness(settings(num_slots=pool, disable_radix_cache=True, context_length=500))
    harness.add(request("big", 9, max_new=20), request("next", 10, max_new=20))
    assert rids_of(harness.plan()) == admitted


def test_the_first_that_does_not_fit_ends_the_pass() -> None:
    harness = Harness(settings(num_slots=100))
    harness.add(request("a", 30, max_new=30), request("big", 60, max_new=20), request("small", 2, max_new=2))
    assert rids_of(harness.plan()) == ["a"]
    harness.run()
    harness.check_outputs()


def test_a_long_prompt_is_cut_to_whole_pages_and_each_turn_goes_on_with_it() -> None:
    harness = Harness(settings(page_size=8, chunked_prefill_size=20))
    harness.add(request("long", 50, max_new=2))
    harness.run()
    counts = [step.extends[0].count for step in harness.steps if step.extends]
    assert counts == [16, 16, 18]
    harness.check_outputs()


def test_a_pass_takes_no_more_than_max_prefill_tokens_unless_one_prompt_alone_is_longer() -> None:
    harness = Harness(settings(chunked_prefill_size=-1, max_prefill_tokens=30))
    harness.add(request("a", 20, max_new=1), request("b", 20, max_new=1), request("c", 60, max_new=1))
    passes = []
    while harness.scheduler.has_work:
        harness.turn()
    passes = [rids_of(step) for step in harness.steps if step.extends]
    assert passes == [["a"], ["b"], ["c"]]


def test_running_rows_reserve_a_share_of_what_they_may_still_generate_and_all_of_it_with_ignore_eos() -> None:
    for ignore_eos, admitted in ((False, True), (True, False)):
        harness = Harness(settings(num_slots=120, disable_radix_cache=True))
        params = SamplingParams(max_new_tokens=80, ignore_eos=ignore_eos)
        harness.add(request("runs", 10, params=params))
        harness.turn()
        harness.turn()
        harness.add(request("next", 20, max_new=20))
        step = harness.plan()
        # 120 - 12 used - 78 reserved leaves 30 with ignore_eos, 120 - 12 - 55 leaves 53 without; the price is 41
        assert bool(step.extends) is admitted


def test_the_interval_lets_decodes_run_between_two_prefill_passes() -> None:
    harness = Harness(settings(prefill_decode_interval=3, chunked_prefill_size=16))
    harness.add(request("a", 10, max_new=30))
    harness.turn()
    harness.add(request("b", 40, max_new=3))
    harness.run()
    modes = "".join("P" if step.extends else "d" for step in harness.steps)
    assert modes.startswith("PdddPdddPdddPddd")
    harness.check_outputs()


def test_mixed_passes_carry_decode_rows() -> None:
    harness = Harness(settings(enable_mixed_chunk=True, chunked_prefill_size=16))
    harness.add(request("a", 10, max_new=12))
    harness.turn()
    harness.add(request("b", 40, max_new=3))
    harness.run()
    mixed = [step for step in harness.steps if step.batch.mode is ForwardMode.MIXED]
    assert len(mixed) == 3
    assert [step.extends[0].count for step in mixed] == [15, 15, 10]
    assert all("a" in step.rids for step in mixed)
    harness.check_outputs()


def test_requests_share_a_prefix_that_is_being_computed() -> None:
    harness = Harness(settings(num_slots=600, chunked_prefill_size=64))
    stem = list(range(90))
    harness.add(*(request(f"r{n}", [*stem, n], max_new=2) for n in range(6)))
    harness.add(request("other", [3, 2, 1], max_new=2))
    harness.run()
    harness.check_outputs()
    first = [rids_of(step) for step in harness.steps if step.extends]
    assert first[0] == ["r0"]
    assert first[1][:2] == ["r0", "other"], "others may pass meanwhile"
    assert [harness.ends[f"r{n}"].num_cached_tokens for n in range(6)] == [0, 90, 90, 90, 90, 90]
    assert harness.scheduler.stats().totals["deferrals"] >= 5


def test_short_shared_prefixes_and_other_salts_do_not_wait() -> None:
    harness = Harness(settings(num_slots=600, chunked_prefill_size=200))
    harness.add(request("a", [*range(31), 1], max_new=1), request("b", [*range(31), 2], max_new=1))
    harness.add(request("c", [*range(60), 1], max_new=1, cache_salt="x"))
    harness.add(request("d", [*range(60), 2], max_new=1, cache_salt="y"))
    assert rids_of(harness.plan()) == ["a", "b", "c", "d"]


def test_the_wait_for_a_shared_prefix_is_bounded() -> None:
    """Leaders that are aborted one after the other cannot hold a request back for ever."""
    harness = Harness(settings(num_slots=600, chunked_prefill_size=200, enable_priority_scheduling=True))
    stem = list(range(80))
    waiter = request("waiter", [*stem, 1], max_new=1)
    harness.add(waiter)
    for n in range(30):
        harness.add(request(f"leader{n}", [*stem, 90], max_new=1, priority=5))
        harness.turn()
        harness.scheduler.evict_cache(600)
    assert waiter.deferrals == 8
    assert len([step for step in harness.steps if "waiter" in rids_of(step)]) == 1
    assert "waiter" in rids_of(harness.steps[8])
    harness.run()
    harness.check_outputs()


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    harness = Harness(settings(page_size=16))
    harness.add(request("a", list(range(40)), max_new=3))
    harness.run()
    harness.add(request("b", list(range(40)), max_new=3))
    harness.run()
    assert (harness.ends["a"].num_cached_tokens, harness.ends["b"].num_cached_tokens) == (0, 32)
    totals = harness.scheduler.stats().totals
    assert (totals["prompt_tokens"], totals["cached_prompt_tokens"]) == (80, 32)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(overlap: bool) -> None:
    harness = Harness(settings(), overlap=overlap)
    for rid in ("a", "b"):
        harness.add(request(rid, list(range(20)), max_new=3))
        harness.run()
    assert harness.ends["b"].num_cached_tokens == 19
    harness.check_outputs()


def test_a_request_that_is_tried_again_and_again_is_one_hit_and_only_when_it_is_admitted() -> None:
    harness = Harness(settings(num_slots=100, radix_eviction_policy="lfu"))
    stem = list(range(20))
    harness.add(request("warm", stem, max_new=0))
    harness.run()
    harness.add(request("runs", [90] * 30, params=SamplingParams(max_new_tokens=40, ignore_eos=True)))
    harness.turn()
    waits = request("waits", [*stem, 60, 61], max_new=20)
    harness.add(waits)
    cache = harness.scheduler._state.memory.cache
    _, node = cache.peek(harness.requests["warm"].prompt, None, len(stem))
    for _ in range(30):
        harness.turn()
    assert (waits.row, node.hits) == (0, 0)
    harness.run()
    harness.check_outputs()
    assert (waits.cached_tokens, node.hits) == (20, 1)
