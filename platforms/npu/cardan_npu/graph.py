"""Decode steps captured as NPU graphs, one for each bucket of rows; larger ones run eagerly, and the log says so.

It knows no model: a step is a function that the runner gives.

Sources: Ascend Extension for PyTorch 7.3.0, ``torch_npu.npu.NPUGraph``, ``torch_npu.npu.graph`` and
``NPUGraph.update``: data come in by copies to captured addresses, and lengths that the fused attention takes from the
host are updated before a replay. A captured graph holds at least one of the device's streams, of which there are 2,048.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cardan.platform import AttentionMeta, CapturedStep, GraphRunner
from cardan_npu.attention import NpuAttention
from cardan_npu.fixed_plan import FixedPlan
from cardan_npu.memory import TOP_BUCKET
from cardan_torch import Ladder, row_counts

logger = logging.getLogger(__name__)

SMALL_BUCKETS = (1, 2, 4, 8)

MOST_GRAPHS = 48
"""Captured steps kept; the one unused for longest goes first. Far below the streams that a device has."""


def bucket_ladder(top: int) -> tuple[int, ...]:
    """Row counts that decode steps are captured for, smallest first; none for ``top`` of 0."""
    return row_counts(SMALL_BUCKETS, top)


@dataclass(frozen=True, slots=True)
class Captured:
    """One captured step.

    Attributes:
        graph: what is replayed.
        input_ids: int32 ``[rows]``, read by it.
        plan: the attention's, read by it.
        hidden: ``[rows, hidden]``, written by it.
    """

    graph: Any
    input_ids: torch.Tensor
    plan: FixedPlan
    hidden: torch.Tensor


class NpuGraphRunner(GraphRunner):
    """Captures a bucket's step when it is first met, and replays it from then on.

    What a replay returns is overwritten by the next one of its bucket.
    """

    def __init__(self, backend: NpuAttention, step: CapturedStep, top: int) -> None:
        """Make a runner.

        Args:
            backend: whose plans the step takes.
            step: ``(input_ids, positions, plan) -> hidden``.
            top: most rows of a captured step.
        """
        self._backend = backend
        self._step = step
        self._ladder = Ladder(bucket_ladder(top), TOP_BUCKET)
        self._captured: OrderedDict[tuple[int, int], Captured] = OrderedDict()
        self._pool: Any = torch.npu.graph_pool_handle()  # type: ignore[attr-defined]
        self._replayed: Any = torch.npu.Event()  # type: ignore[attr-defined]
        self._under_way = False
        self._said_eager = False

    @property
    def buckets(self) -> tuple[tuple[int, int], ...]:
        """Rows of the captured steps, and keys that layers without the fused call gather (0 where there are none)."""
        return tuple(self._captured)

    def can_replay(self, meta: AttentionMeta) -> bool:
        """Whether a step has no more rows than the largest bucket, and the fused operator takes them in one call."""
        count = len(meta.row_ids)
        if not self._ladder.holds(count):
            return False
        if self._in_one_call(meta, self._ladder.size_for(count) - count):
            return True
        if not self._said_eager:
            self._said_eager = True
            logger.warning(
                "a decode step of %d rows runs eagerly: with the pages that they share they have more together than "
                "the KV pool, and one call of npu_fused_infer_attention_score takes no more. Lower "
                "--max-running-requests, or raise --max-total-tokens where memory allows it.",
                count,
            )
        return False

    def _in_one_call(self, meta: AttentionMeta, padding: int) -> bool:
        """Whether rows have no more pages together than the cache; those that fill up have one each."""
        if not any(self._backend.fused):
            return True
        pool = self._backend.pool
        pages = int((-(-meta.seq_lens.astype(np.int64) // pool.page_size)).sum())
        return pages + padding <= pool.num_pages

    def replay(self, input_ids: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """Run a decode step of ``input_ids: int32 [rows]``; returns ``[rows, hidden]``."""
        count = len(meta.row_ids)
        bucket = (self._ladder.size_for(count), self._gathered_width(meta))
        if self._under_way:  # lengths of the last replay must not change while it runs
            self._replayed.synchronize()
        captured = self._captured.get(bucket)
        if captured is None:
            captured = self._capture(bucket, input_ids, meta)
        else:
            captured.plan.refill(meta)
            captured.input_ids[:count].copy_(input_ids)
        self._captured.move_to_end(bucket)
        updates = captured.plan.updates()
        if updates:
            captured.graph.update(cpu_update_input=updates)
        captured.graph.replay()
        self._replayed.record()
        self._under_way = True
        return captured.hidden[:count]

    def close(self) -> None:
        """Give the graphs' memory and streams back."""
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured.clear()

    def _gathered_width(self, meta: AttentionMeta) -> int:
        """Keys that layers without the fused call gather: whole pages, in steps of powers of two."""
        if all(self._backend.fused):
            return 0
        pages = -(-int(np.max(meta.seq_lens)) // self._backend.pool.page_size)
        return (1 << (pages - 1).bit_length()) * self._backend.pool.page_size

    def _capture(self, bucket: tuple[int, int], input_ids: torch.Tensor, meta: AttentionMeta) -> Captured:
        """Run the step once as it is, so that everything lazy is done, and then record it."""
        rows, width = bucket
        if len(self._captured) >= MOST_GRAPHS:
            self._captured.popitem(last=False)[1].graph.reset()
        plan = self._backend.fixed_plan(rows, width)
        plan.refill(meta)
        ids = torch.zeros(rows, dtype=torch.int32, device=input_ids.device)
        ids[: len(input_ids)].copy_(input_ids)
        self._step(ids, plan.positions, plan)
        torch.npu.synchronize()  # type: ignore[attr-defined]
        plan.calls.clear()
        graph = torch.npu.NPUGraph()  # type: ignore[attr-defined]
        with torch.npu.graph(graph, pool=self._pool, auto_dispatch_capture=True):  # type: ignore[attr-defined]
            hidden = self._step(ids, plan.positions, plan)
        captured = self._captured[bucket] = Captured(graph, ids, plan, hidden)
        return captured
