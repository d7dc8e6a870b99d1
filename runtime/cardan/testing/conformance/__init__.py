"""The conformance suite: what any platform has to get right, tried on any installed one, in this repository or not.

It knows no platform. ``cardan conform`` and ``pytest --pyargs cardan.testing --platform NAME`` run the same checks.
"""

from cardan.testing.conformance.check import Check, CheckError, NotApplicableError
from cardan.testing.conformance.report import Outcome, Report, Status
from cardan.testing.conformance.subject import Subject
from cardan.testing.conformance.suite import PARTS, collect, run_check, run_suite
from cardan.testing.conformance.tiny_configs import TINY_CONFIGS

__all__ = [
    "PARTS",
    "TINY_CONFIGS",
    "Check",
    "CheckError",
    "NotApplicableError",
    "Outcome",
    "Report",
    "Status",
    "Subject",
    "collect",
    "run_check",
    "run_suite",
]
