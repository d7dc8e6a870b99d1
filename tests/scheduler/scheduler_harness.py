"""The plain and the overlapped loop around a scheduler and the fake device, and a record of what came out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from fake_device import VOCAB_SIZE, FakeDevice, expected_output, prompt_logprob

from cardan.scheduler import OutputBatch, Request, RequestOutput, Scheduled, Scheduler, SchedulerSettings
from cardan.types import FinishKind, FinishReason, LogprobParams, SamplingParams, StepResult, TokenLogprobs

EOS = 5


def settings(**changes: Any) -> SchedulerSettings:
    base = SchedulerSettings(
        num_slots=256,
        context_length=200,
        vocab_size=VOCAB_SIZE,
        max_running_requests=8,
        chunked_prefill_size=64,
    )
    return replace(base, **changes)


def request(rid: str, prompt: list[int] | int = 10, max_new: int = 8, **changes: Any) -> Request:
    """A request; a number as prompt makes one of that length that differs from rid to rid. No EOS unless given."""
    if isinstance(prompt, int):
        rng = np.random.default_rng(sum(map(ord, rid)) * 1009 + len(rid))
        prompt = rng.integers(0, VOCAB_SIZE, prompt).tolist()
    params = changes.pop("params", SamplingParams(max_new_tokens=max_new))
    return Request(rid=rid, prompt_ids=prompt, params=params, **changes)


class PairStop:
    """Ends a request when its last two tokens sum up to a multiple of a number; stands for a stop string."""

    def __init__(self, number: int = 13) -> None:
        self.number = number

    def check(self, output_ids: list[int], new_count: int) -> FinishReason | None:
        assert new_count == 1
        if len(output_ids) >= 2 and sum(output_ids[-2:]) % self.number == 0:
            return FinishReason(FinishKind.STOP, matched="pair")
        return None


@dataclass
class Harness:
    """Drives a scheduler; every output is collected by rid."""

    settings: SchedulerSettings
    overlap: bool = False
    failure_rate: int = 0
    full_check_every: int = 1
    now_s: float = 0.0
    turns: int = 0
    requests: dict[str, Request] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, RequestOutput] = field(default_factory=dict)
    first_token_s: dict[str, float] = field(default_factory=dict)
    detailed: dict[str, list[RequestOutput]] = field(default_factory=dict)
    steps: list[Scheduled] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.settings)
        self.device = FakeDevice(self.settings, self.failure_rate)
        self.flying: deque[tuple[Scheduled, StepResult]] = deque()

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.scheduler.add(one)
            self.requests[one.rid] = one
            self.tokens[one.rid] = []
            self.detailed[one.rid] = []

    def plan(self) -> Scheduled | None:
        """Plan and launch a step."""
        self.now_s += 0.01
        self.turns += 1
        scheduled = self.scheduler.plan(self.now_s)
        if scheduled is not None:
            self.steps.append(scheduled)
            self._check_in_flight(scheduled)
            self.flying.append((scheduled, self.device.launch(scheduled.batch)))
        self.check()
        self.take(self.scheduler.take_outputs())
        return scheduled

    def commit(self) -> None:
        """Read the oldest step in flight."""
        scheduled, result = self.flying.popleft()
        self.take(self.scheduler.commit(scheduled, result))
        self.check_after_commit()

    def turn(self) -> bool:
        """One turn of the loop. Returns whether anything happened."""
        scheduled = self.plan()
        happened = scheduled is not None or bool(self.flying)
        keep = 1 if self.overlap and scheduled is not None else 0
        while len(self.flying) > keep:
            self.commit()
        return happened

    def check_after_commit(self) -> None:
        if self.full_check_every == 1 or self.turns % 4 == 0:
            self.check()

    def check(self) -> None:
        if self.turns % self.full_check_every == 0:
            self.scheduler.check_invariants()
        else:
            self.scheduler._state.memory.check_slots()

    def take(self, outputs: OutputBatch) -> None:
        assert len(outputs.rids) == len(outputs.token_ids)
        for rid, tokens in outputs.tokens():
            assert rid not in self.ends, "news after the end"
            if tokens:
                self.first_token_s.setdefault(rid, self.now_s)
            self.tokens[rid].extend(tokens)
        for output in outputs.detailed:
            self.detailed[output.rid].append(output)
            if output.finish_reason is not None:
                self.ends[output.rid] = output

    def run(self, limit: int = 100_000) -> None:
        """Turn until no work is left."""
        while self.scheduler.has_work:
            assert self.turn(), "the scheduler has work and does nothing"
            limit -= 1
            assert limit, "the scheduler does not come to an end"

    def check_outputs(self) -> None:
        """Every request ended as it would have alone; an aborted one got a beginning of that."""
        for rid, one in self.requests.items():
            self._check_output(rid, one)

    def check_nothing_left(self) -> None:
        """With all requests gone, every slot and row can be had again."""
        memory = self.scheduler._state.memory
        assert memory.cache.locked_tokens == 0
        assert self.scheduler.flush_cache()
        assert memory.slots.num_free_tokens == self.settings.num_slots
        assert memory.table.num_free == self.settings.max_running_requests

    def _check_output(self, rid: str, one: Request) -> None:
        tokens, kind = expected_output(one, self.failure_rate)
        end = self.ends[rid].finish_reason
        assert end is not None
        if end.kind is FinishKind.ABORT:
            assert self.tokens[rid] == tokens[: len(self.tokens[rid])]
            return
        assert (self.tokens[rid], end.kind) == (tokens, kind), f"{rid} differs from what it would be alone"
        details = self.detailed[rid]
        if one.logprobs.output:
            logprobs = [entry for output in details for entry in output.logprobs]
            assert logprobs == [TokenLogprobs(logprob=-float(token)) for token in tokens]
        if one.logprobs.prompt_start is not None and end.kind is not FinishKind.ERROR:
            assert [entry for output in details for entry in output.prompt_logprobs] == expected_prompt_logprobs(one)

    def _check_in_flight(self, scheduled: Scheduled) -> None:
        """A slot that a step in flight writes is not written by the next one, nor is it free."""
        taken = np.zeros(self.settings.num_slots + self.settings.page_size, dtype=bool)
        taken[scheduled.batch.out_slots[0]] = True
        free = np.zeros(len(taken), dtype=bool)
        free[self.scheduler._state.memory.slots.free_pages()] = True
        for other, _ in self.flying:
            written = other.batch.out_slots[0]
            assert not taken[written].any(), "a slot is written by two steps in flight"
            assert not free[written // self.settings.page_size].any(), "a slot in flight was given back"


def expected_prompt_logprobs(one: Request) -> list[TokenLogprobs | None]:
    start = one.logprobs.prompt_start
    assert start is not None
    values: list[TokenLogprobs | None] = [None] if start == 0 else []
    for position in range(max(start, 1), one.num_prompt):
        target = int(one.prompt[position])
        values.append(TokenLogprobs(logprob=prompt_logprob(one.prompt[:position], target)))
    return values


__all__ = ["EOS", "Harness", "LogprobParams", "PairStop", "SamplingParams", "request", "settings"]
