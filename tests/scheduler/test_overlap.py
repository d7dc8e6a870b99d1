from __future__ import annotations

import numpy as np
import pytest
from fake_device import expected_output
from scheduler_harness import Harness, LogprobParams, SamplingParams, request, settings

from cardan.types import FinishKind, ForwardMode, StepResult


def test_decode_rows_take_their_input_from_the_device_while_their_token_is_in_flight() -> None:
    harness = Harness(settings(), overlap=True)
    harness.add(request("a", max_new=4))
    harness.run()
    decodes = [step.batch for step in harness.steps if step.batch.mode is ForwardMode.DECODE]
    assert [batch.input_ids.tolist() for batch in decodes] == [[-1]] * 3
    plain = Harness(settings())
    plain.add(request("a", max_new=4))
    plain.run()
    known = [step.batch.input_ids.tolist() for step in plain.steps[1:]]
    assert known == [[token] for token in plain.tokens["a"][:3]]


def test_a_row_that_ends_by_length_is_left_out_of_the_next_step() -> None:
    harness = Harness(settings(), overlap=True)
    harness.add(request("short", max_new=2), request("long", max_new=6))
    harness.run()
    assert sum("short" in step.rids for step in harness.steps) == 2
    assert harness.scheduler.stats().totals.get("dropped_tokens", 0) == 0


def test_a_row_that_stops_on_a_token_has_one_token_dropped_and_keeps_its_slot_until_that_step_is_read() -> None:
    tokens, _ = expected_output(_with_order(request("a", max_new=30)))
    stop = next(token for i, token in enumerate(tokens) if i >= 2 and token not in tokens[:i])
    params = SamplingParams(max_new_tokens=30, stop_token_ids=(stop,))
    harness = Harness(settings(disable_radix_cache=True), overlap=True)
    harness.add(request("a", params=params))
    memory = harness.scheduler._state.memory
    while "a" not in harness.ends:
        harness.turn()
    assert len(harness.flying) == 1, "the step after the stop is in flight"
    in_flight = harness.flying[0][0].batch.out_slots[0]
    assert not np.isin(in_flight, memory.slots.free_pages()).any()
    assert memory.table.num_free == harness.settings.max_running_requests - 1
    harness.run()
    assert harness.scheduler.stats().totals["dropped_tokens"] == 1
    assert harness.tokens["a"] == tokens[: tokens.index(stop) + 1]
    harness.check_nothing_left()


def _with_order(one):  # type: ignore[no-untyped-def]
    """Fill in what the scheduler would: limit and seed."""
    probe = Harness(settings())
    probe.add(one)
    return one


@pytest.mark.parametrize("page_size", [1, 16])
def test_retracting_a_row_whose_token_is_in_flight_keeps_the_token(page_size: int) -> None:
    harness = Harness(settings(page_size=page_size), overlap=True)
    harness.add(request("a", 20, max_new=12), request("b", 20, max_new=12))
    for _ in range(5):
        harness.turn()
    victim = harness.requests["a"]
    before = len(victim.output_ids)
    assert victim.rid in harness.flying[0][0].rids
    harness.scheduler._state.retract(victim, "pool full")
    harness.scheduler.check_invariants()
    harness.commit()
    assert len(victim.output_ids) == before + 1, "the token in flight joins what is prefilled again"
    harness.run()
    harness.check_outputs()
    assert harness.ends["a"].num_retractions == 1


def test_a_retracted_request_may_end_with_the_token_that_was_in_flight() -> None:
    harness = Harness(settings(), overlap=True)
    harness.add(request("a", 20, max_new=4), request("b", 20, max_new=12))
    while len(harness.requests["a"].output_ids) < 3:
        harness.turn()
    harness.scheduler._state.retract(harness.requests["a"], "pool full")
    harness.commit()
    assert harness.ends["a"].finish_reason.kind is FinishKind.LENGTH
    harness.run()
    harness.check_outputs()
    harness.check_nothing_left()


@pytest.mark.parametrize("turns", [1, 2, 3, 5])
def test_an_abort_in_flight_ends_at_once_and_gives_everything_back_when_the_step_is_read(turns: int) -> None:
    harness = Harness(settings(chunked_prefill_size=16), overlap=True)
    harness.add(request("a", 40, max_new=12), request("b", 10, max_new=3))
    for _ in range(turns):
        harness.turn()
    assert harness.scheduler.abort("a") == ["a"]
    harness.take(harness.scheduler.take_outputs())
    assert harness.ends["a"].finish_reason.kind is FinishKind.ABORT
    harness.run()
    harness.check_outputs()
    harness.check_nothing_left()


def test_abort_of_all_and_of_none() -> None:
    harness = Harness(settings(max_running_requests=1), overlap=True)
    harness.add(request("a"), request("b"), request("c", needs_grammar=True))
    harness.turn()
    assert harness.scheduler.abort("unknown") == []
    assert harness.scheduler.abort(None) == ["a", "b", "c"]
    harness.take(harness.scheduler.take_outputs())
    assert set(harness.ends) == {"a", "b", "c"}
    harness.run()
    harness.check_nothing_left()


def test_a_third_step_in_flight_is_a_bug() -> None:
    harness = Harness(settings())
    harness.add(request("a"))
    harness.plan()
    harness.plan()
    with pytest.raises(AssertionError, match="before a third"):
        harness.scheduler.plan(0.0)


def test_steps_are_committed_in_order() -> None:
    harness = Harness(settings())
    harness.add(request("a"))
    harness.plan()
    harness.plan()
    scheduled, result = harness.flying[1]
    with pytest.raises(AssertionError, match="in the order they were planned"):
        harness.scheduler.commit(scheduled, result)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("failed", "token", "message"), [(True, 1, "NaN"), (False, 97, "token 97"), (False, -1, "token -1")]
)
def test_a_bad_row_ends_alone(overlap: bool, failed: bool, token: int, message: str) -> None:
    harness = Harness(settings(), overlap=overlap)
    harness.add(request("bad", 12, max_new=9), request("good", 12, max_new=9))
    for _ in range(3):
        harness.turn()
    scheduled = harness.plan()
    assert scheduled is not None
    _, result = harness.flying[-1]
    index = scheduled.rids.index("bad")
    tokens, flags = result.tokens.copy(), result.failed.copy()
    tokens[index], flags[index] = token, failed
    harness.flying[-1] = (scheduled, StepResult(tokens=tokens, failed=flags))
    while harness.flying:
        harness.commit()
    end = harness.ends["bad"].finish_reason
    assert end.kind is FinishKind.ERROR
    assert message in end.message
    harness.run()
    assert harness.tokens["good"] == expected_output(harness.requests["good"])[0]
    assert harness.scheduler.stats().totals["failed_requests"] == 1
    harness.check_nothing_left()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("start", [0, 1, 17, 49, 50])
def test_prompt_logprobs_are_whole_over_chunks_and_never_lost_to_the_cache(overlap: bool, start: int) -> None:
    harness = Harness(settings(chunked_prefill_size=16), overlap=overlap)
    prompt = list(range(50))
    harness.add(request("warm", prompt, max_new=1))
    harness.run()
    harness.add(request("asks", prompt, max_new=3, logprobs=LogprobParams(output=True, prompt_start=start)))
    harness.run()
    harness.check_outputs()
    assert harness.ends["asks"].num_cached_tokens == min(max(start - 1, 0), 49)
