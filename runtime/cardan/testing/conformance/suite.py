"""Collects the checks that fit a platform, runs them, and writes down how each ended.

It knows no check by name; parts bring their own.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping

from cardan import __version__
from cardan.errors import ConfigError
from cardan.platform import PLATFORM_API
from cardan.testing.conformance import (
    attention_checks,
    capability_checks,
    end_to_end_checks,
    graph_checks,
    kv_checks,
    linear_checks,
    memory_checks,
    op_checks,
    sampler_checks,
)
from cardan.testing.conformance.check import Check, CheckError, NotApplicableError
from cardan.testing.conformance.report import Outcome, Report, Status
from cardan.testing.conformance.subject import Subject

PARTS: Mapping[str, Callable[[Subject], Iterable[Check]]] = {
    "capabilities": capability_checks.checks,
    "memory": memory_checks.checks,
    "ops": op_checks.checks,
    "linear": linear_checks.checks,
    "attention": attention_checks.checks,
    "kv": kv_checks.checks,
    "sampler": sampler_checks.checks,
    "graph": graph_checks.checks,
    "end_to_end": end_to_end_checks.checks,
}
"""Parts of the suite in the order they are run, each with what makes its checks for a platform."""


def collect(subject: Subject, only: Iterable[str] = (), flag: str = "--only") -> list[Check]:
    """The checks of some parts, or of all.

    Args:
        subject: the platform; its device is not opened.
        only: parts, or beginnings of ``part/name``; empty for everything.
        flag: what ``only`` was given with, for messages.

    Raises:
        ConfigError: a part is unknown.
    """
    wanted = tuple(only)
    unknown = [text for text in wanted if text.partition("/")[0] not in PARTS]
    if unknown:
        raise ConfigError(f"{flag} must begin with one of {', '.join(PARTS)}, got {unknown[0]!r}.")
    checks = [check for make in PARTS.values() for check in make(subject)]
    if not wanted:
        return checks
    kept = [check for check in checks if any(check.part == text or check.id.startswith(text) for text in wanted)]
    if not kept:
        raise ConfigError(
            f"{flag} {' '.join(wanted)} matches no check of this platform. Name a part: {', '.join(PARTS)}."
        )
    return kept


def run_check(subject: Subject, check: Check) -> Outcome:
    """Run one check; whatever it raises becomes its outcome."""
    start_s = time.perf_counter()
    status, detail = Status.PASSED, ""
    try:
        if check.needs_ops:
            subject.needs_ops()
        check.run(subject)
    except NotApplicableError as reason:
        status, detail = Status.SKIPPED, str(reason)
    except CheckError as error:
        status, detail = Status.FAILED, str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a platform may raise anything; it becomes the outcome
        status, detail = Status.FAILED, _describe(error)
    return Outcome(check.part, check.name, status, detail, time.perf_counter() - start_s)


def run_suite(
    subject: Subject, only: Iterable[str] = (), on_outcome: Callable[[Outcome], None] | None = None
) -> Report:
    """Run the checks of some parts, or of all, and the micro-benchmarks of the operations.

    Args:
        subject: the platform.
        only: as in ``collect``.
        on_outcome: called after each check.

    Raises:
        ConfigError: a part is unknown.
    """
    start_s = time.perf_counter()
    outcomes = []
    parts = set()
    for check in collect(subject, only):
        outcome = run_check(subject, check)
        parts.add(check.part)
        outcomes.append(outcome)
        if on_outcome is not None:
            on_outcome(outcome)
    level, benchmarks = _look_once_more(subject, benchmark="ops" in parts)
    return Report(
        platform=subject.platform.name,
        device=f"{subject.info.name} {subject.info.detail}".strip(),
        level=level,
        api=PLATFORM_API,
        version=__version__,
        quick=subject.quick,
        outcomes=tuple(outcomes),
        evidence=_evidence(subject),
        benchmarks=benchmarks,
        seconds=time.perf_counter() - start_s,
    )


def _look_once_more(subject: Subject, *, benchmark: bool) -> tuple[int | None, dict[str, float]]:
    """The device's level and the times of its operations; None and nothing where it does not open any more."""
    level = None
    try:
        level = subject.level
        return level, op_checks.benchmark(subject) if benchmark and level == 2 else {}
    except (Exception, SystemExit):  # noqa: BLE001 - a platform may raise anything; the report says what is known
        return level, {}


def _evidence(subject: Subject) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for feature, answer in subject.capabilities.features.items():
        if subject.capabilities.supports(feature):
            kind = answer.evidence.value
            found[kind] = (*found.get(kind, ()), str(feature))
    return found


def _describe(error: BaseException) -> str:
    """Type, message and the innermost place of an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"raised {type(error).__name__}: {error}{where}"
