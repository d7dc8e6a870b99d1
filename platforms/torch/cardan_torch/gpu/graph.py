"""Decode steps captured for a ladder of row counts and replayed; larger ones run eagerly, and the log says so.

It knows no model: a step is a function that the runner gives. It knows no kind of graph: the accelerator captures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from cardan.errors import MemoryPlanError
from cardan.platform import AttentionMeta, CapturedStep, GraphRunner
from cardan_torch.gpu.accelerator import Accelerator, CapturedWork
from cardan_torch.gpu.memory import TOP_BUCKET
from cardan_torch.ladder import Ladder, row_counts

SMALL_BUCKETS = (1, 2, 4, 8, 12)


@runtime_checkable
class ReplayedAttention(Protocol):
    """What a backend adds to ``AttentionBackend`` so that its decode steps can be replayed."""

    def fixed_plan(self, rows: int) -> Any:
        """A plan of ``rows`` decode rows over memory that stays; it has ``positions``, int32 ``[rows]``."""

    def refill(self, plan: Any, meta: AttentionMeta) -> None:
        """Bring a step's rows into a fixed plan, and fill up with padding rows."""


def bucket_ladder(top: int) -> tuple[int, ...]:
    """Row counts that decode steps are captured for, smallest first; the last holds ``top`` rows."""
    return row_counts(SMALL_BUCKETS, top, reaching=True)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One captured step.

    Attributes:
        work: what is replayed.
        input_ids: int32 ``[rows]``, read by it.
        plan: the attention's, read by it.
        hidden: ``[rows, hidden]``, written by it.
    """

    work: CapturedWork
    input_ids: torch.Tensor
    plan: Any
    hidden: torch.Tensor


class GpuGraphRunner(GraphRunner):
    """Captures every bucket when the first decode step comes, largest first, and replays from then on.

    What a replay returns is overwritten by the next one of its bucket.
    """

    def __init__(
        self, accelerator: Accelerator, backend: ReplayedAttention, step: CapturedStep, buckets: Sequence[int]
    ) -> None:
        """Make a runner; nothing is captured yet.

        Args:
            accelerator: captures.
            backend: whose plans the step takes.
            step: ``(input_ids, positions, plan) -> hidden``.
            buckets: row counts, smallest first.
        """
        self._accelerator = accelerator
        self._backend = backend
        self._step = step
        self._ladder = Ladder(buckets, TOP_BUCKET)
        self._buckets: dict[int, Bucket] = {}
        self._views: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def buckets(self) -> tuple[int, ...]:
        """Row counts in the order in which they were captured."""
        return tuple(self._buckets)

    def can_replay(self, meta: AttentionMeta) -> bool:
        """Whether a step has no more rows than the largest bucket."""
        return self._ladder.holds(len(meta.row_ids))

    def replay(self, input_ids: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """Run a decode step of ``input_ids: int32 [rows]``; returns ``[rows, hidden]``.

        Raises:
            MemoryPlanError: the first step found no memory for a capture; nothing stays captured.
        """
        if not self._buckets:
            self._buckets = self._capture_all()
        count = len(meta.row_ids)
        rows = self._ladder.size_for(count)
        bucket = self._buckets[rows]
        self._backend.refill(bucket.plan, meta)
        bucket.input_ids[:count].copy_(input_ids)
        bucket.work.replay()
        return self._first_rows(rows, count)

    def _first_rows(self, rows: int, count: int) -> torch.Tensor:
        """The same tensor each time for a bucket and a count, since recordings that follow are told apart by it."""
        key = (rows, count)
        if key not in self._views:
            self._views[key] = self._buckets[rows].hidden[:count]
        return self._views[key]

    def _capture_all(self) -> dict[int, Bucket]:
        captured: dict[int, Bucket] = {}
        for rows in reversed(self._ladder.counts):
            try:
                captured[rows] = self._capture(rows)
            except torch.OutOfMemoryError as error:
                raise MemoryPlanError(
                    f"No memory is left on the GPU to capture a decode step of {rows} rows, with "
                    f"{len(captured)} of {len(self._ladder.counts)} sizes captured. Pass --platform-option "
                    f"{TOP_BUCKET} with fewer than {self._ladder.counts[-1]} rows, a smaller --mem-fraction-static, or "
                    "--disable-graph."
                ) from error
        return captured

    def _capture(self, rows: int) -> Bucket:
        ids = torch.zeros(rows, dtype=torch.int32, device=self._accelerator.device)
        plan = self._backend.fixed_plan(rows)

        def run() -> tuple[torch.Tensor, ...]:
            hidden: torch.Tensor = self._step(ids, plan.positions, plan)
            return (hidden,)

        if self._accelerator.compiles:
            run()
        work, (hidden,) = self._accelerator.capture(run)
        return Bucket(work, ids, plan, hidden)
