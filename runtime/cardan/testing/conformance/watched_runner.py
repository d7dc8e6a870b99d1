"""A runner around a platform's own that counts what becomes of its steps.

It knows no engine: what is counted is what the engine asked for and what the platform said of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cardan.platform import Runner, Step
from cardan.types import Batch, Float32Array, ForwardMode, StepResult


class _WatchedStep(Step):
    def __init__(self, step: Step, runner: WatchedRunner) -> None:
        self._step = step
        self._runner = runner
        self._read = False

    @property
    def replayed(self) -> bool:
        """As the platform says."""
        return self._step.replayed

    def logits(self, rows: Sequence[int]) -> Float32Array:
        """See ``Step.logits``."""
        return self._step.logits(rows)

    def sample(self, sampling: Any = None, mask: Any = None) -> None:
        """See ``Step.sample``."""
        self._step.sample(sampling, mask)

    def result(self) -> StepResult:
        """See ``Step.result``."""
        result = self._step.result()
        self._runner.in_flight -= not self._read
        self._read = True
        return result


class WatchedRunner(Runner):
    """Passes everything on.

    Attributes:
        in_flight: steps that were launched and not read.
        most_in_flight: largest number of these so far.
        steps: launched so far, by what their rows do.
        most_extended: most tokens of a step of prefill alone.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.in_flight = 0
        self.most_in_flight = 0
        self.steps: Counter[ForwardMode] = Counter()
        self.most_extended = 0

    def warm_up(self, buckets: Sequence[int]) -> None:
        """See ``Runner.warm_up``."""
        self._runner.warm_up(buckets)

    def launch(self, batch: Batch) -> Step:
        """See ``Runner.launch``."""
        step = self._runner.launch(batch)
        self.in_flight += 1
        self.steps[batch.mode] += 1
        if batch.mode is ForwardMode.EXTEND:
            self.most_extended = max(self.most_extended, batch.num_tokens)
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return _WatchedStep(step, self)

    def close(self) -> None:
        """See ``Runner.close``."""
        self._runner.close()
