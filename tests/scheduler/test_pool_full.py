from __future__ import annotations

import pytest
from scheduler_harness import Harness, request, settings

from cardan.scheduler import RetractionLogged
from cardan.scheduler.reserve import NewTokenRatio


def crowded(overlap: bool = False, **changes: object) -> Harness:
    """Four requests of which the pool cannot hold the whole output."""
    harness = Harness(settings(num_slots=100, schedule_conservativeness=0.01, **changes), overlap=overlap)
    for number, prompt in enumerate((12, 8, 10, 10)):
        harness.add(request(f"r{number}", prompt, max_new=40))
    return harness


@pytest.mark.parametrize("overlap", [False, True])
def test_a_full_pool_retracts_and_everyone_still_gets_all_tokens(overlap: bool) -> None:
    harness = crowded(overlap)
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.stats().totals["retractions"] > 0
    harness.check_nothing_left()


def test_the_victim_has_the_fewest_tokens_and_then_the_longest_prompt() -> None:
    harness = crowded()
    retracted = []
    while not retracted:
        harness.turn()
        retracted = [event for event in harness.scheduler.take_events() if isinstance(event, RetractionLogged)]
    assert retracted[0].rid == "r0", "all have as many tokens, and this prompt is the longest"
    assert "Retracted r0 (pool full) with" in retracted[0].describe()


def test_a_retracted_request_goes_before_all_others() -> None:
    harness = crowded()
    while not any(one.num_retractions for one in harness.requests.values()):
        harness.turn()
    harness.add(request("late", 4, max_new=2))
    waiting = [one.rid for one in harness.scheduler._state.waiting]
    assert waiting[-1] == "late"
    assert harness.requests[waiting[0]].num_retractions == 1


def test_one_row_is_always_kept() -> None:
    harness = Harness(settings(num_slots=64, schedule_conservativeness=0.01, context_length=500))
    harness.add(request("a", 10, max_new=500), request("b", 10, max_new=500))
    harness.run()
    harness.check_outputs()
    assert min(one.num_retractions for one in harness.requests.values()) == 0


def test_with_a_step_in_flight_that_gives_enough_back_the_pool_is_not_robbed() -> None:
    """A row that stopped gives its slots back when its last step is read: that is waited for, and counted."""
    harness = crowded(overlap=True, disable_radix_cache=True)
    harness.run()
    harness.check_outputs()
    totals = harness.scheduler.stats().totals
    reasons = [key for key in totals if key.startswith("fallback:pool full")]
    assert reasons
    assert totals[reasons[0]] > 0


def test_rows_that_end_by_length_in_this_step_need_no_room() -> None:
    harness = Harness(settings(num_slots=24, schedule_conservativeness=0.01, disable_radix_cache=True), overlap=True)
    harness.add(request("a", 8, max_new=4), request("b", 8, max_new=4))
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.stats().totals.get("retractions", 0) == 0


def test_a_half_done_prompt_gives_way_to_the_last_row() -> None:
    harness = Harness(
        settings(num_slots=64, chunked_prefill_size=8, schedule_conservativeness=0.01, disable_radix_cache=True)
    )
    harness.add(request("a", 10, max_new=44))
    harness.turn()
    harness.add(request("b", 50, max_new=3))
    harness.run()
    harness.check_outputs()
    harness.check_nothing_left()


def test_the_ratio_falls_linearly_to_its_least_and_starts_over_when_idle() -> None:
    ratio = NewTokenRatio(1.0)
    assert ratio.value == pytest.approx(0.7)
    for _ in range(300):
        ratio.decay()
    assert ratio.value == pytest.approx((0.7 + 0.098) / 2)
    for _ in range(900):
        ratio.decay()
    assert ratio.value == pytest.approx(0.098)
    ratio.raise_after_retraction(generated=100, allowed=999, count=5)
    assert ratio.value == pytest.approx(0.2)
    ratio.raise_after_retraction(generated=100, allowed=10, count=5)
    assert ratio.value == 1.0
    ratio.reset()
    assert ratio.value == pytest.approx(0.7)
    assert NewTokenRatio(2.0).value == 1.0


def test_the_ratio_is_reset_when_nothing_runs_or_waits() -> None:
    harness = Harness(settings())
    harness.add(request("a", max_new=20))
    harness.run()
    assert harness.scheduler.stats().new_token_ratio < 0.7
    harness.plan()
    assert harness.scheduler.stats().new_token_ratio == pytest.approx(0.7)
