"""Makes the fake device and the harness importable, and sums up how long the simulation took."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

_TOTALS: Counter[str] = Counter()


@pytest.fixture
def simulation_totals() -> Counter[str]:
    """Counts of all simulated runs; printed at the end."""
    return _TOTALS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the simulation did and how long it took."""
    if _TOTALS["requests"]:
        terminalreporter.write_line(
            f"simulated {_TOTALS['requests']} requests in {_TOTALS['steps']} steps: {_TOTALS['wall_ms'] / 1000:.1f} s "
            f"({_TOTALS['cpu_ms'] / 1000:.1f} s of one core), {_TOTALS['retractions']} retractions, "
            f"{_TOTALS['preemptions']} preemptions, {_TOTALS['deferrals']} deferrals, "
            f"{_TOTALS['aborted_requests']} aborts, {_TOTALS['dropped_tokens']} dropped tokens"
        )
