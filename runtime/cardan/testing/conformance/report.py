"""The report card of a run: outcomes by check, evidence by feature, times by operation, as plain data and JSON.

It draws nothing: the command line renders it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


class Status(enum.StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one check ended.

    Attributes:
        part: of the suite.
        name: of the check within it.
        status: how it ended.
        detail: what was got, where it failed; the reason, where it was skipped.
        seconds: it took.
    """

    part: str
    name: str
    status: Status
    detail: str = ""
    seconds: float = 0.0

    @property
    def id(self) -> str:
        """``part/name``."""
        return f"{self.part}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run of the suite on one platform.

    Attributes:
        platform: its name.
        device: the device's name and detail.
        level: 1 or 2, or None when the device did not open.
        api: ``PLATFORM_API`` of this Cardan.
        version: of this Cardan.
        quick: whether the run was a quick one.
        outcomes: in the order they were run.
        evidence: for each kind of evidence, the features that the platform claims by it.
        benchmarks: microseconds of one call of each operation, results brought to the host.
        seconds: the run took.
    """

    platform: str
    device: str
    level: int | None
    api: int
    version: str
    quick: bool
    outcomes: tuple[Outcome, ...]
    evidence: Mapping[str, tuple[str, ...]]
    benchmarks: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether no check failed, and at least one passed."""
        return not self.of(Status.FAILED) and bool(self.of(Status.PASSED))

    def of(self, status: Status) -> tuple[Outcome, ...]:
        """Outcomes of one kind."""
        return tuple(outcome for outcome in self.outcomes if outcome.status is status)

    def counts(self) -> dict[str, Counter[str]]:
        """Outcomes counted by part, then by status."""
        counted: dict[str, Counter[str]] = {}
        for outcome in self.outcomes:
            counted.setdefault(outcome.part, Counter())[outcome.status.value] += 1
        return counted

    def skips(self) -> dict[str, tuple[str, ...]]:
        """Reasons of skips, each with the checks that it holds for."""
        reasons: dict[str, tuple[str, ...]] = {}
        for outcome in self.of(Status.SKIPPED):
            reasons[outcome.detail] = (*reasons.get(outcome.detail, ()), outcome.id)
        return reasons

    def to_json(self) -> dict[str, Any]:
        """JSON values of everything."""
        return {
            **asdict(self),
            "outcomes": [{**asdict(outcome), "status": outcome.status.value} for outcome in self.outcomes],
            "evidence": {kind: list(features) for kind, features in self.evidence.items()},
            "benchmarks": dict(self.benchmarks),
            "passed": self.passed,
        }
