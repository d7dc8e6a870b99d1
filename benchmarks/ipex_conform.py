"""The conformance suite on the CPU by torch's kernels, with attention by IPEX; runs where that is installed.

It takes a file, where it writes how many checks passed and were skipped, and the parts to run, all by default. It ends
with 1 where a check failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from cardan.cli.conforming import show_report
from cardan.cli.terminal import results
from cardan.platform import DeviceInfo, ModelFacts, Recommendation
from cardan.testing.conformance import Subject, run_suite
from cardan.testing.conformance.report import Status
from cardan_cpu import CpuPlatform


class AttendingByIpex(CpuPlatform):
    """The CPU platform, whose engines attend by IPEX unless they are told otherwise."""

    def recommend(self, facts: ModelFacts, device: DeviceInfo) -> Mapping[str, Recommendation]:
        """See ``Platform.recommend``."""
        by_ipex = Recommendation("ipex", "what is tried here")
        return {**super().recommend(facts, device), "attention_backend": by_ipex}


def main() -> int:
    """Run the suite and show its report."""
    with Subject(AttendingByIpex(), options=("kernels=torch",)) as subject:
        report = run_suite(subject, tuple(sys.argv[2:]))
    show_report(results(), report)
    counted = {status.value: len(report.of(status)) for status in (Status.PASSED, Status.SKIPPED)}
    Path(sys.argv[1]).write_text(json.dumps(counted), encoding="utf-8")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
