"""The scheduler is timed over decode steps at the asked number of rows."""

from __future__ import annotations

import pytest

from cardan.bench.scheduler_time import measure_scheduler
from cardan.errors import ConfigError


@pytest.mark.parametrize(("rows", "page_size"), [(1, 1), (8, 16)])
def test_times_are_measured(rows: int, page_size: int) -> None:
    measured = measure_scheduler(rows, steps=10, page_size=page_size)
    assert (measured.rows, measured.steps) == (rows, 10)
    assert 0 < measured.plan_us < 1e6
    assert 0 < measured.commit_us < 1e6
    assert measured.total_us <= measured.p99_us


@pytest.mark.parametrize(("rows", "steps", "flag"), [(0, 5, "--rows"), (1, 0, "--steps")])
def test_nothing_to_measure_is_refused(rows: int, steps: int, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} must be at least 1, got 0"):
        measure_scheduler(rows, steps)
