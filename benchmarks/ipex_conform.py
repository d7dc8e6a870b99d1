"""The conformance suite on the CPU by torch's kernels, with attention by IPEX; runs where that is installed.

It takes the parts to run as arguments, all by default, and ends with 1 where a check failed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from cardan.cli.conforming import show_report
from cardan.cli.terminal import results
from cardan.platform import DeviceInfo, ModelFacts, Recommendation
from cardan.testing.conformance import Subject, run_suite
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
        report = run_suite(subject, tuple(sys.argv[1:]))
    show_report(results(), report)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
