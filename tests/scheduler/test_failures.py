"""What a failed request computed is not to be trusted, whenever it computed it and whoever uses it meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_harness import Harness, request, settings

from cardan.types import FinishKind, StepResult

PROMPT = list(range(12))


def spoil(harness: Harness, *rids: str) -> None:
    """Let rows of the newest step in flight fail."""
    scheduled, result = harness.flying[-1]
    failed = result.failed | np.isin(scheduled.rids, rids)
    assert failed.sum() == len(rids), "they are in this step"
    harness.flying[-1] = (
        scheduled,
        StepResult(
            tokens=result.tokens,
            failed=failed,
            logprobs=result.logprobs,
            prompt_logprobs=result.prompt_logprobs,
        ),
    )


def warmed(overlap: bool = False, **changes: object) -> Harness:
    """A request has computed the first four tokens of the prompt, and has ended well."""
    harness = Harness(settings(**changes), overlap=overlap)
    harness.add(request("warm", PROMPT[:4], max_new=0))
    harness.run()
    return harness


def retract(harness: Harness, rid: str) -> None:
    harness.scheduler._state.retract(harness.requests[rid], "pool full")
    harness.check()


def ends_with_an_error(harness: Harness, rid: str) -> bool:
    reason = harness.ends[rid].finish_reason
    return reason is not None and reason.kind is FinishKind.ERROR


@pytest.mark.parametrize("overlap", [False, True])
def test_what_it_computed_before_it_was_retracted_goes_as_well(overlap: bool) -> None:
    harness = warmed(overlap)
    harness.add(request("bad", PROMPT, max_new=9))
    for _ in range(4):
        harness.turn()
    retract(harness, "bad")
    while harness.plan() is None or not harness.requests["bad"].row:
        harness.commit()
    assert harness.requests["bad"].prefill_start > len(PROMPT), "it found again what it had computed"
    spoil(harness, "bad")
    while harness.flying:
        harness.commit()
    assert ends_with_an_error(harness, "bad")
    assert harness.scheduler.stats().cached_tokens == 4
    harness.check_nothing_left()


def test_a_token_that_was_in_flight_when_its_row_was_retracted_is_bad() -> None:
    harness = warmed(overlap=True)
    harness.add(request("bad", PROMPT, max_new=9))
    for _ in range(3):
        harness.turn()
    spoil(harness, "bad")
    retract(harness, "bad")
    while harness.flying:
        harness.commit()
    assert ends_with_an_error(harness, "bad")
    assert harness.scheduler.stats().cached_tokens == 4
    harness.check_nothing_left()


def test_what_another_uses_goes_when_that_one_fails_too() -> None:
    harness = warmed(num_slots=600)
    harness.add(request("first", PROMPT, max_new=9))
    for _ in range(3):
        harness.turn()
    harness.add(request("second", [*PROMPT, 50, 51], max_new=9))
    harness.plan()
    while harness.flying:
        harness.commit()
    assert harness.requests["second"].prefill_start >= len(PROMPT)
    harness.plan()
    spoil(harness, "first")
    while harness.flying:
        harness.commit()
    assert ends_with_an_error(harness, "first")
    assert harness.requests["second"].row, "it goes on with what it has"
    harness.plan()
    spoil(harness, "second")
    while harness.flying:
        harness.commit()
    assert ends_with_an_error(harness, "second")
    assert harness.scheduler.stats().cached_tokens == 4
    harness.check_nothing_left()
