"""Rows that a grammar forces ahead: the same tokens as one by one, in both loops, through full pools."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_device import VOCAB_SIZE, next_token
from scheduler_harness import EOS, Harness, PairStop, SamplingParams, request, settings

from cardan.scheduler import Request, SampledWith
from cardan.types import FinishKind, ForwardMode, LogprobParams


class Foreseeing:
    """Forces, at random places, the very tokens that the device would sample, so that none may change."""

    def __init__(self, of: Request, lengths: tuple[int, ...] = (0, 0, 1, 2, 5, 30)) -> None:
        self.request = of
        self.lengths = lengths
        self.taken: list[int] = []
        self.forced: list[int] = []
        self.complete = False
        self.error: str | None = None
        self.at_limit = False
        self.stops_forcing_after = 10**6
        self.ends_after: int | None = None
        self.refuses: int | None = None

    def accept(self, token: int) -> bool:
        if self.forced:
            assert token == self.forced.pop(0), "a forced token was not kept to"
        self.taken.append(token)
        assert self.taken == self.request.output_ids[: len(self.taken)]
        if len(self.taken) == self.refuses:
            self.error = "no such word"
            return False
        self.complete = len(self.taken) == self.ends_after
        if not self.forced:
            self.foresee()
        return True

    def foresee(self) -> None:
        if len(self.taken) >= self.stops_forcing_after:
            return
        sequence = [*self.request.prompt.tolist(), *self.taken]
        for _ in range(self.lengths[sum(sequence) % len(self.lengths)]):
            token = next_token(np.asarray(sequence), self.request.seed)
            if token in self.request.stop_ids or self.complete:
                break
            self.forced.append(token)
            sequence.append(token)


def add(harness: Harness, *requests: Request, **changes: Any) -> list[Foreseeing]:
    harness.add(*requests)
    grammars = [Foreseeing(one, **changes) for one in requests]
    for one, grammar in zip(requests, grammars, strict=True):
        harness.scheduler.grammar_ready(one.rid, grammar)
    return grammars


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "page-16": {"page_size": 16},
    "mixed-page-16": {"enable_mixed_chunk": True, "chunked_prefill_size": 32, "page_size": 16},
    "crowded": {"num_slots": 224, "max_running_requests": 24, "schedule_conservativeness": 0.05},
    "crowded-page-16": {
        "num_slots": 224,
        "max_running_requests": 24,
        "schedule_conservativeness": 0.05,
        "page_size": 16,
        "enable_mixed_chunk": True,
    },
    "never-mixed": {"mixed_batch": False, "page_size": 16},
    "no-cache": {"disable_radix_cache": True, "num_slots": 200},
    "priority": {"schedule_policy": "priority", "enable_priority_scheduling": True, "max_running_requests": 3},
}


@pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlapped"])
@pytest.mark.parametrize("name", CONFIGS)
def test_forced_tokens_change_nothing(name: str, overlap: bool) -> None:
    rng = random.Random(f"{name}{overlap}")
    harness = Harness(settings(**CONFIGS[name]), overlap=overlap, full_check_every=3)
    prefix = [rng.randrange(97) for _ in range(40)]
    totals: Counter[str] = Counter()
    for number in range(100):
        has_grammar = rng.random() < 0.6
        one = request(
            f"r{number}",
            prefix[: rng.choice((0, 16, 40))] + [rng.randrange(97) for _ in range(rng.choice((1, 3, 17)))],
            params=SamplingParams(
                max_new_tokens=rng.choice((1, 90, 150) if "crowded" in name else (1, 7, 40, 90)),
                min_new_tokens=rng.choice((0, 0, 1)),
                stop=("x",) if (has_stop := rng.random() < 0.2) else (),
                frequency_penalty=rng.choice((0.0, 0.5)),
                ignore_eos=rng.random() < 0.5,
            ),
            stop=PairStop() if has_stop else None,
            eos_ids=frozenset({EOS}),
            needs_grammar=has_grammar,
            priority=rng.choice((0, 0, 50)),
            logprobs=LogprobParams(output=True) if rng.random() < 0.1 else LogprobParams(),
        )
        if has_grammar:
            add(harness, one)
        else:
            harness.add(one)
        for _ in range(rng.choice((0, 0, 1) if "crowded" in name else (0, 1, 4))):
            if "crowded" in name:
                harness.scheduler._state.ratio.value = 0.0
            harness.turn()
        if rng.random() < 0.05:
            harness.scheduler.abort(f"r{rng.randrange(number + 1)}")
    while harness.scheduler.has_work:
        harness.scheduler._state.ratio.value *= "crowded" not in name
        assert harness.turn()
    harness.check_outputs()
    harness.check_nothing_left()
    totals.update(harness.scheduler.stats().totals)
    assert totals["jumped_tokens"] > 500
    if "crowded" in name:
        assert totals["retractions"] >= 2
    if CONFIGS[name].get("mixed_batch") is False:
        assert all(step.batch.mode is not ForwardMode.MIXED for step in harness.steps)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlapped"])
def test_a_forced_run_costs_one_step(overlap: bool) -> None:
    steps = {}
    for jump in (True, False):
        harness = Harness(settings(jump_forward=jump, page_size=16), overlap=overlap)
        add(harness, request("a", 10, max_new=100, needs_grammar=True), lengths=(12,))
        harness.run()
        harness.check_outputs()
        steps[jump] = len(harness.steps)
        assert bool(harness.scheduler.stats().totals.get("jumped_tokens", 0)) is jump
    assert steps[True] <= steps[False] // (3 if overlap else 10)


def test_the_step_after_a_jump_computes_all_that_was_forced() -> None:
    harness = Harness(settings())
    (grammar,) = add(harness, request("a", 10, max_new=50, needs_grammar=True), lengths=(5,))
    grammar.stops_forcing_after = 2
    harness.turn()
    harness.turn()
    batch = harness.steps[1].batch
    assert batch.input_ids.tolist() == harness.tokens["a"][:6]
    assert batch.positions.tolist() == list(range(10, 16))
    assert batch.seq_lens.tolist() == [16]
    assert batch.logits_at.tolist() == [5]


def test_rows_that_want_logprobs_are_sampled_one_by_one() -> None:
    harness = Harness(settings())
    one = request("a", 10, max_new=20, needs_grammar=True, logprobs=LogprobParams(output=True))
    add(harness, one, lengths=(5,))
    harness.run()
    harness.check_outputs()
    assert "jumped_tokens" not in harness.scheduler.stats().totals


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("least", [0, 30])
def test_a_complete_grammar_ends_the_request_whatever_its_least_length(overlap: bool, least: int) -> None:
    harness = Harness(settings(), overlap=overlap)
    params = SamplingParams(max_new_tokens=40, min_new_tokens=least, ignore_eos=True)
    one = request("a", 10, params=params, needs_grammar=True)
    (grammar,) = add(harness, one, lengths=(3,))
    grammar.ends_after = 10
    harness.run()
    reason = harness.ends["a"].finish_reason
    assert reason is not None
    assert (reason.kind, reason.matched) == (FinishKind.STOP, None)
    assert len(harness.tokens["a"]) == 10


def test_length_ends_a_request_within_a_forced_run() -> None:
    harness = Harness(settings())
    add(harness, request("a", 10, max_new=4, needs_grammar=True), lengths=(30,))
    harness.run()
    harness.check_outputs()
    assert harness.ends["a"].finish_reason.kind is FinishKind.LENGTH
    assert len(harness.steps) == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_token_that_the_grammar_refuses_ends_the_request_with_an_error(overlap: bool) -> None:
    harness = Harness(settings(), overlap=overlap)
    (grammar,) = add(harness, request("a", 10, max_new=40, needs_grammar=True), lengths=(0,))
    grammar.refuses = 7
    harness.add(request("b", 10, max_new=10))
    harness.run()
    reason = harness.ends["a"].finish_reason
    assert reason.kind is FinishKind.ERROR
    assert reason.message is not None
    assert "no such word" in reason.message
    assert reason.code is None, "a mask that was not applied is no fault of the request's"
    assert harness.ends["b"].finish_reason.kind is FinishKind.LENGTH
    harness.check_nothing_left()


def test_a_row_without_tokens_to_sample_says_why_the_grammar_stopped() -> None:
    harness = Harness(settings(), failure_rate=1)
    (grammar,) = add(harness, request("a", 10, needs_grammar=True))
    grammar.error = "too complex"
    harness.run()
    reason = harness.ends["a"].finish_reason
    assert reason.message == "The grammar allows no token, so the request was ended: too complex"
    assert reason.code is None


@pytest.mark.parametrize("fails", [True, False])
def test_a_grammar_that_runs_into_its_own_limit_is_the_requests_fault(fails: bool) -> None:
    """Whether the limit shows when the mask is made, or when the token is taken."""
    harness = Harness(settings(), failure_rate=float(fails))
    (grammar,) = add(harness, request("a", 10, max_new=20, needs_grammar=True), lengths=(0,))
    grammar.at_limit = True
    grammar.error = "too complex" if fails else None
    grammar.refuses = 3
    harness.run()
    reason = harness.ends["a"].finish_reason
    assert reason.kind is FinishKind.ERROR
    why = "too complex" if fails else "no such word"
    assert reason.message == f"The grammar ran into a limit, so the request was ended: {why}"
    assert reason.code == "grammar_limit"


VOCABULARY = range(VOCAB_SIZE)


@pytest.mark.parametrize(
    ("held_to", "given", "fields", "code"),
    [
        ({1, 2}, None, {"logit_bias": {1: -np.inf, 2: -1e300}}, "no_token_allowed"),
        ({1, 2}, None, {"logit_bias": {1: -np.inf, 3: -np.inf}}, None),
        ({1}, None, {"logit_bias": {1: -100.0}}, None),
        ({9}, None, {"min_new_tokens": 2, "stop_token_ids": (9,)}, "no_token_allowed"),
        ({9, 1}, None, {"min_new_tokens": 2, "stop_token_ids": (9,)}, None),
        (set(), None, {}, "no_token_allowed"),
        (None, None, {"logit_bias": dict.fromkeys(VOCABULARY, -1e300)}, "no_token_allowed"),
        (None, None, {"logit_bias": dict.fromkeys(VOCABULARY[1:], -1e300)}, None),
        (None, {7}, {"logit_bias": {7: -1e300}}, "no_token_allowed"),
        (None, {7}, {"logit_bias": {8: -1e300}}, None),
        ({7, 8}, {7, 9}, {"logit_bias": {7: -1e300}}, "no_token_allowed"),
        ({7, 8}, {7, 8}, {"logit_bias": {7: -1e300}}, None),
    ],
)
def test_a_row_that_gives_no_token_is_the_fault_of_who_left_it_none(
    held_to: set[int] | None, given: set[int] | None, fields: dict[str, Any], code: str | None
) -> None:
    """The row fails whatever is allowed, so that only what was forbidden tells the request's fault from a NaN."""
    harness = Harness(settings(), failure_rate=1)
    one = request("a", 10, params=SamplingParams(max_new_tokens=20, **fields), needs_grammar=held_to is not None)
    if held_to is not None:
        add(harness, one, lengths=(0,))
    else:
        harness.add(one)
    harness.plan()
    scheduled, result = harness.flying.popleft()
    sampling = scheduled.batch.sampling
    assert sampling is not None
    if given is not None:
        logits = np.where(np.isin(VOCABULARY, list(given)), 3.0, -np.inf).astype(np.float32)
        sampling = replace(sampling, given_logits=(np.array([0], np.int32), logits[None]))
    mask = None
    if held_to is not None:
        bits = np.isin(np.arange(128), list(held_to)).astype(np.uint8)
        mask = np.packbits(bits, bitorder="little").view(np.uint32)[None]
    harness.take(harness.scheduler.commit(scheduled, result, SampledWith(sampling, mask)))
    reason = harness.ends["a"].finish_reason
    assert reason.kind is FinishKind.ERROR
    assert reason.code == code
    assert ("leaves no token" if code else "held NaN or allowed no token") in reason.message


def test_a_request_that_forbids_the_whole_vocabulary_is_told_so_by_the_plan_alone() -> None:
    harness = Harness(settings())
    harness.add(request("a", 10, params=SamplingParams(logit_bias=dict.fromkeys(VOCABULARY, -np.inf))))
    harness.add(request("b", 10))
    harness.run()
    assert harness.ends["a"].finish_reason.code == "no_token_allowed"
    assert harness.ends["b"].finish_reason.kind is FinishKind.LENGTH
    harness.check_nothing_left()
