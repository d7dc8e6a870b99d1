"""How long the scheduler itself takes for a decode step: planning it, and taking its result in.

No device runs: results are made up, so what is measured is the host's work alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from cardan.errors import ConfigError
from cardan.scheduler import Request, Scheduled, Scheduler, SchedulerSettings
from cardan.types import ForwardMode, SamplingParams, StepResult

PROMPT_TOKENS = 64
VOCAB = 32_000
WARM_UP_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerTime:
    """Host time of decode steps at one number of rows, in microseconds.

    Attributes:
        rows: running requests.
        steps: how many steps were measured.
        plan_us: median of ``Scheduler.plan``.
        commit_us: median of ``Scheduler.commit``.
        total_us: median of both together.
        p99_us: 99th percentile of both together.
    """

    rows: int
    steps: int
    plan_us: float
    commit_us: float
    total_us: float
    p99_us: float


def measure_scheduler(rows: int, steps: int = 200, page_size: int = 1) -> SchedulerTime:
    """Run ``rows`` requests for ``steps`` decode steps and time the scheduler.

    Raises:
        ConfigError: rows or steps are not above 0.
    """
    for flag, value in (("--rows", rows), ("--steps", steps)):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}.")
    scheduler = _filled_scheduler(rows, steps + WARM_UP_STEPS, page_size)
    plan_s: list[float] = []
    commit_s: list[float] = []
    while len(plan_s) < steps + WARM_UP_STEPS:
        start_s = time.perf_counter()
        scheduled = scheduler.plan(start_s)
        planned_s = time.perf_counter()
        assert scheduled is not None, "requests that never end are running"
        result = _made_up_result(scheduled)
        ready_s = time.perf_counter()
        scheduler.commit(scheduled, result)
        if scheduled.batch.mode is ForwardMode.DECODE and scheduled.batch.num_rows == rows:
            plan_s.append(planned_s - start_s)
            commit_s.append(time.perf_counter() - ready_s)
    plan_us, commit_us = (np.asarray(times[WARM_UP_STEPS:]) * 1e6 for times in (plan_s, commit_s))
    total_us = plan_us + commit_us
    return SchedulerTime(
        rows=rows,
        steps=steps,
        plan_us=float(np.median(plan_us)),
        commit_us=float(np.median(commit_us)),
        total_us=float(np.median(total_us)),
        p99_us=float(np.percentile(total_us, 99)),
    )


def _filled_scheduler(rows: int, steps: int, page_size: int) -> Scheduler:
    """A scheduler with that many requests waiting, and room for all of them to run ``steps`` steps."""
    output = 2 * steps + 16
    length = -(-(PROMPT_TOKENS + output + 1) // page_size) * page_size + page_size
    settings = SchedulerSettings(
        num_slots=rows * length + page_size * 2,
        page_size=page_size,
        context_length=length + 16,
        vocab_size=VOCAB,
        max_running_requests=rows,
        max_prefill_tokens=max(16384, rows * PROMPT_TOKENS),
    )
    scheduler = Scheduler(settings)
    random = np.random.default_rng(0)
    for number in range(rows):
        scheduler.add(
            Request(
                rid=str(number),
                prompt_ids=random.integers(1, VOCAB, PROMPT_TOKENS).astype(np.int32),
                params=SamplingParams(max_new_tokens=output, temperature=0.0, ignore_eos=True),
            )
        )
    return scheduler


def _made_up_result(scheduled: Scheduled) -> StepResult:
    count = scheduled.batch.logits_at.shape[0]
    return StepResult(tokens=np.full(count, 7, np.int32), failed=np.zeros(count, np.bool_))
