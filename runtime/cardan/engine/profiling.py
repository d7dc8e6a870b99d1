"""Records what a loop does, step by step, and writes it as a Chrome trace (chrome://tracing, Perfetto).

It stands around a loop's state and changes nothing of what that does; with no recording there is none of it.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from cardan.engine.loops import InFlight, LoopState
from cardan.errors import RequestError
from cardan.scheduler import OutputBatch

MAX_STEPS = 100_000
"""Most steps of one recording, which then ends by itself: some 60 MB of JSON."""


@dataclass(slots=True)
class StepTrace:
    """Spans of one recording.

    Attributes:
        folder: where it is written.
        steps_left: after how many more steps it ends by itself.
        events: Chrome trace events so far.
        started_s: on the clock of spans.
        num_steps: steps that were launched.
    """

    folder: Path
    steps_left: int
    events: list[dict[str, Any]] = field(default_factory=list)
    started_s: float = field(default_factory=time.perf_counter)
    num_steps: int = 0

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[dict[str, Any]]:
        """Record what is done inside; entries of the dictionary are shown with it."""
        shown: dict[str, Any] = {}
        begin_s = time.perf_counter()
        yield shown
        taken_us = (time.perf_counter() - begin_s) * 1e6
        start_us = (begin_s - self.started_s) * 1e6
        self.events.append(
            {"name": name, "ph": "X", "ts": start_us, "dur": taken_us, "pid": 1, "tid": 1, "args": shown}
        )

    def write(self) -> Path:
        """Write the trace. Returns where.

        Raises:
            RequestError: the folder cannot be written.
        """
        now = datetime.datetime.now(datetime.UTC)
        path = self.folder / f"cardan-trace-{now:%Y%m%dT%H%M%S%f}.json"
        named = [
            {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "scheduler"}},
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "loop"}},
        ]
        trace = {"displayTimeUnit": "ms", "traceEvents": [*named, *self.events], "num_steps": self.num_steps}
        try:
            path.write_bytes(msgspec.json.encode(trace))
        except OSError as error:
            raise RequestError(
                f"The profile could not be written to {path}: {error.strerror}. Make room there, or start the server "
                "with another --profile-folder.",
                code="profile_not_written",
            ) from error
        return path


@dataclass(slots=True)
class TracedLoop(LoopState):
    """A loop's state that records what is done with it."""

    trace: StepTrace = field(kw_only=True)

    @classmethod
    def around(cls, state: LoopState, trace: StepTrace) -> TracedLoop:
        """The same state, recorded from now on."""
        return cls(**_values(state), trace=trace)

    def untraced(self) -> LoopState:
        """The same state, no longer recorded."""
        return LoopState(**_values(self))

    def launch_next(self) -> InFlight | None:
        """See ``LoopState.launch_next``."""
        with self.trace.span("plan") as shown:
            scheduled = self.scheduler.plan(self.clock())
            if scheduled is None:
                return None
            batch = scheduled.batch
            shown |= {"rows": batch.num_rows, "tokens": batch.num_tokens}
        self.trace.num_steps += 1
        self.trace.steps_left -= 1
        with self.trace.span("launch") as shown:
            launched = InFlight(scheduled, self.runner.launch(batch))
            shown |= {"mode": str(batch.mode), "rows": batch.num_rows, "tokens": batch.num_tokens}
            shown["replayed"] = launched.step.replayed
        return launched

    def sample(self, launched: InFlight, *, committed: bool) -> None:
        """See ``LoopState.sample``."""
        with self.trace.span("sample") as shown:
            LoopState.sample(self, launched, committed=committed)
            shown["sampled"] = launched.sampled

    def read(self, launched: InFlight) -> OutputBatch:
        """See ``LoopState.read``."""
        with self.trace.span("wait"):
            launched.step.result()
        with self.trace.span("commit"):
            return LoopState.read(self, launched)


def _values(state: LoopState) -> dict[str, Any]:
    return {item.name: getattr(state, item.name) for item in fields(LoopState)}


class Profiler:
    """Starts and ends recordings of one engine."""

    def __init__(self, folder: str | None) -> None:
        """Bind the folder that the server was started with, or None where it has none."""
        self._folder = None if folder is None else Path(folder)
        self._trace: StepTrace | None = None

    def start(self, state: LoopState, num_steps: int | None) -> LoopState:
        """Record from now on, for ``num_steps`` or until told to stop. Returns the state to go on with.

        Raises:
            RequestError: there is no folder, or a recording is under way.
        """
        if self._folder is None:
            raise RequestError(
                "Profiles are off, since there is no folder for them. Start the server with --profile-folder DIR.",
                code="feature_not_enabled",
            )
        if self._trace is not None:
            raise RequestError("A profile is being recorded already. Send /stop_profile first.", code="busy")
        self._trace = StepTrace(self._folder, min(num_steps or MAX_STEPS, MAX_STEPS))
        return TracedLoop.around(state, self._trace)

    def ended(self, state: LoopState) -> bool:
        """Whether a recording has all the steps it was started for."""
        return isinstance(state, TracedLoop) and state.trace.steps_left <= 0

    def stop(self, state: LoopState) -> tuple[LoopState, StepTrace]:
        """End the recording. Returns the state to go on with, and the recording.

        Raises:
            RequestError: there is none.
        """
        trace, self._trace = self._trace, None
        if trace is None:
            raise RequestError("No profile is being recorded. Send /start_profile first.", code="not_started")
        return state.untraced() if isinstance(state, TracedLoop) else state, trace
