"""The plain and the overlapped loop around a scheduler and the fake device, and a record of what came out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from fake_device import FakeDevice

from cardan.scheduler import OutputBatch, Request, RequestOutput, Scheduled, Scheduler, SchedulerSettings
from cardan.types import StepResult


@dataclass
class Harness:
    """Drives a scheduler; every output is collected by rid."""

    settings: SchedulerSettings
    overlap: bool = False
    check: bool = True
    now_s: float = 0.0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, RequestOutput] = field(default_factory=dict)
    detailed: dict[str, list[RequestOutput]] = field(default_factory=dict)
    steps: list[Scheduled] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.settings)
        self.device = FakeDevice(self.settings)
        self.flying: deque[tuple[Scheduled, StepResult]] = deque()
        self.keep_steps = False

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.tokens[request.rid] = []
            self.detailed[request.rid] = []

    def turn(self) -> bool:
        """One turn. Returns whether anything happened."""
        self.now_s += 0.01
        scheduled = self.scheduler.plan(self.now_s)
        if scheduled is not None:
            if self.keep_steps:
                self.steps.append(scheduled)
            self.check_in_flight(scheduled)
            self.flying.append((scheduled, self.device.launch(scheduled.batch)))
        if self.check:
            self.scheduler.check_invariants()
        self.take(self.scheduler.take_outputs())
        keep = 1 if self.overlap and scheduled is not None else 0
        happened = scheduled is not None or bool(self.flying)
        while len(self.flying) > keep:
            self.commit_one()
        return happened

    def commit_one(self) -> None:
        scheduled, result = self.flying.popleft()
        self.take(self.scheduler.commit(scheduled, result, self.now_s))
        if self.check:
            self.scheduler.check_invariants()

    def check_in_flight(self, scheduled: Scheduled) -> None:
        """A slot that a step in flight writes is not written by the next one."""
        for other, _ in self.flying:
            both = np.intersect1d(other.batch.out_slots[0], scheduled.batch.out_slots[0])
            assert both.size == 0, f"slots {both} are written by two steps in flight"

    def take(self, outputs: OutputBatch) -> None:
        for rid, tokens in outputs.tokens():
            assert rid not in self.ends, "news after the end"
            self.tokens[rid].extend(tokens)
        for output in outputs.detailed:
            self.detailed[output.rid].append(output)
            assert output.num_completion_tokens == len(self.tokens[output.rid])
            if output.finish_reason is not None:
                self.ends[output.rid] = output

    def run(self, limit: int = 100_000) -> None:
        """Turn until no work is left."""
        while self.scheduler.has_work:
            assert self.turn(), "the scheduler has work and does nothing"
            limit -= 1
            assert limit, "the scheduler does not come to an end"
