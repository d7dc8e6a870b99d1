"""Makes the fake device and the harness importable, and sums up how long the simulation took."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def simulation_totals(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """Counts of all simulated runs; printed at the end."""
    totals: Counter[str] = Counter()
    yield totals
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and totals["requests"]:
        reporter.write_line("")
        reporter.write_line(
            f"simulated {totals['requests']} requests in {totals['steps']} steps: {totals['wall_ms'] / 1000:.1f} s, "
            f"{totals['retractions']} retractions, {totals['preemptions']} preemptions, "
            f"{totals['aborted_requests']} aborts, {totals['dropped_tokens']} dropped tokens"
        )
