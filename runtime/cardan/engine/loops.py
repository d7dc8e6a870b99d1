"""The two loops, side by side: the plain one reads each step before it plans the next, the overlapped one after.

They know no socket and no device; both give the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cardan.platform import Runner, Step
from cardan.scheduler import OutputBatch, SampledWith, Scheduled, Scheduler
from cardan.types import SamplingBatch


class Processors(Protocol):
    """What changes the logits of rows whose request has that done before each token."""

    def concern(self, scheduled: Scheduled) -> bool:
        """Whether a step has such a row."""

    def processed(self, scheduled: Scheduled, step: Step) -> SamplingBatch:
        """A step's sampling with what they say, once everything before the step was committed."""

    def take_failed(self) -> list[tuple[str, str]]:
        """Ids of requests whose processor failed since the last call, and why."""


class MaskSource(Protocol):
    """Where grammar masks come from."""

    def masks(self, scheduled: Scheduled) -> npt.NDArray[np.uint32]:
        """Packed masks of a step's rows, once everything before it was committed."""


@dataclass(slots=True)
class InFlight:
    """A step that was launched and not read.

    Attributes:
        scheduled: what was planned.
        step: what the runner gave.
        sampled: whether its rows have been told to sample.
        sampled_with: what they sampled with, where that is more than was planned.
    """

    scheduled: Scheduled
    step: Step
    sampled: bool = False
    sampled_with: SampledWith | None = None


@dataclass(slots=True)
class LoopState:
    """What a loop works on.

    Attributes:
        scheduler: plans and commits.
        runner: launches.
        grammar: gives masks for rows that wait for one.
        processors: change the logits of some rows, or None where no request may ask for that.
        clock: monotonic seconds.
        in_flight: the step that the overlapped loop has not read yet.
        num_replays: steps so far that replayed a captured one.
        last_replayed: whether the step read last did.
    """

    scheduler: Scheduler
    runner: Runner
    grammar: MaskSource | None = None
    clock: Callable[[], float] = time.monotonic
    in_flight: InFlight | None = field(default=None)
    num_replays: int = 0
    last_replayed: bool = False
    processors: Processors | None = None

    def launch_next(self) -> InFlight | None:
        """Plan a step and launch it, or None when there is nothing to run."""
        scheduled = self.scheduler.plan(self.clock())
        if scheduled is None:
            return None
        return InFlight(scheduled, self.runner.launch(scheduled.batch))

    def sample(self, launched: InFlight, *, committed: bool) -> None:
        """Have the rows of a step sample, unless they did, or wait for a mask that needs the step before.

        Args:
            launched: the step.
            committed: everything before it was committed, so masks can be had.
        """
        sampling = launched.scheduled.batch.sampling
        waits = sampling is not None and self.grammar is not None and bool(sampling.has_mask.any())
        processed = sampling is not None and self.processors is not None and self.processors.concern(launched.scheduled)
        if launched.sampled or ((waits or processed) and not committed):
            return
        if processed and self.processors is not None:
            sampling = self.processors.processed(launched.scheduled, launched.step)
            for rid, message in self.processors.take_failed():
                self.scheduler.fail(rid, message)
        mask = self.grammar.masks(launched.scheduled) if waits and self.grammar is not None else None
        launched.step.sample(sampling if processed else None, mask)
        launched.sampled = True
        if sampling is not None and (processed or mask is not None):
            launched.sampled_with = SampledWith(sampling, mask)

    def read(self, launched: InFlight) -> OutputBatch:
        """Wait for a step and do its bookkeeping."""
        self.last_replayed = launched.step.replayed
        self.num_replays += self.last_replayed
        return self.scheduler.commit(launched.scheduled, launched.step.result(), launched.sampled_with)


def plain_turn(state: LoopState) -> OutputBatch | None:
    """Launch a step and read it. Returns its news, or None when there was nothing to run."""
    launched = state.launch_next()
    if launched is None:
        return None
    state.sample(launched, committed=True)
    return state.read(launched)


def overlapped_turn(state: LoopState) -> OutputBatch | None:
    """Launch the next step, then read the one before. Returns that one's news, or None when there was none.

    Rows that wait for a mask sample after the commit, while the forward of their step already runs.
    """
    launched = state.launch_next()
    if launched is not None:
        state.sample(launched, committed=state.in_flight is None)
    before, state.in_flight = state.in_flight, launched
    if before is None:
        return None
    news = state.read(before)
    if launched is not None:
        state.sample(launched, committed=True)
    return news
