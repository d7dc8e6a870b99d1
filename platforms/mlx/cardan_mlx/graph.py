"""Decode steps captured by ``mx.compile``, one for each bucket of rows and KV width.

It knows no model: a step is a function that the runner gives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from cardan.platform import AttentionMeta, GraphRunner
from cardan.platform.ops_device import CapturedStep
from cardan_mlx.attention import MlxAttention
from cardan_mlx.attention_plan import GATHERED_KEYS, DecodePart, StepPlan
from cardan_mlx.kv_pool import MlxKVPool

PAGE = 64
"""KV widths are multiples of this."""

MOST_BUCKETS = 64
"""Captured steps kept; the one unused for longest goes first."""

Compiled = Callable[[mx.array, mx.array, list[mx.array], list[mx.array]], tuple[mx.array, list[mx.array]]]


class MlxGraphRunner(GraphRunner):
    """Captures a bucket's step when it is first met, and replays it for every later step of the bucket.

    The pool goes in as an argument and is only read; the tail goes in and comes out. Rows are padded up to a power of
    two or a multiple of 16, KV widths to pages, from 8 pages on to steps of an eighth or less.
    """

    def __init__(self, pool: MlxKVPool, backend: MlxAttention, step: CapturedStep) -> None:
        """Make a runner.

        Args:
            pool: that the step reads.
            backend: whose plans the step takes.
            step: ``(input_ids, positions, plan) -> hidden``.
        """
        self._pool = pool
        self._backend = backend
        self._step = step
        self._compiled: OrderedDict[tuple[int, int], Compiled] = OrderedDict()

    @property
    def buckets(self) -> tuple[tuple[int, int], ...]:
        """Rows and KV width of the captured steps."""
        return tuple(self._compiled)

    def can_replay(self, meta: AttentionMeta) -> bool:
        """Whether a decode step is small enough: all its rows read the longest one's width."""
        rows, width = self._bucket(meta)
        return rows * width <= GATHERED_KEYS and rows <= self._pool.tail_tokens

    def replay(self, input_ids: mx.array, meta: AttentionMeta) -> mx.array:
        """Run a decode step; returns ``[rows, hidden]``."""
        count = len(meta.row_ids)
        rows, width = self._bucket(meta)
        padded = _padded(meta, rows)
        plan = self._backend.planner.plan_padded(padded, width)
        ids = input_ids if rows == count else mx.concatenate([input_ids, mx.zeros(rows - count, dtype=mx.int32)])
        run = self._bucket_function((rows, width), plan)
        leaves = list(self._pool.leaves())
        half = len(leaves) // 2
        hidden, tails = run(ids, mx.array(padded.positions), _flatten(plan), leaves)
        self._pool.bind((*leaves[:half], *tails))
        return hidden if rows == count else hidden[:count]

    def _bucket(self, meta: AttentionMeta) -> tuple[int, int]:
        return bucket_rows(len(meta.row_ids)), bucket_width(int(meta.seq_lens.max()))

    def _bucket_function(self, bucket: tuple[int, int], plan: StepPlan) -> Compiled:
        found = self._compiled.get(bucket)
        if found is None:
            found = self._compiled[bucket] = mx.compile(self._traced(plan))
            if len(self._compiled) > MOST_BUCKETS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(bucket)
        return found

    def _traced(self, example: StepPlan) -> Compiled:
        """The step as a function of arrays only."""
        kinds = tuple(example.decode)

        def run(
            ids: mx.array, positions: mx.array, arrays: list[mx.array], leaves: list[mx.array]
        ) -> tuple[mx.array, list[mx.array]]:
            held = self._pool.leaves()
            self._pool.bind(leaves)
            try:
                hidden = self._step(ids, positions, _unflatten(kinds, arrays))
                return hidden, list(self._pool.leaves()[len(leaves) // 2 :])
            finally:
                self._pool.bind(held)

        return run


def bucket_rows(rows: int) -> int:
    """The rows that a decode step is padded to."""
    if rows >= 16:
        return -(-rows // 16) * 16
    return 1 << max(rows - 1, 0).bit_length()


def bucket_width(length: int) -> int:
    """The KV width that a decode step is padded to."""
    pages = -(-length // PAGE)
    step = max(1, (1 << pages.bit_length()) // 16)
    return -(-pages // step) * step * PAGE


def _padded(meta: AttentionMeta, rows: int) -> AttentionMeta:
    """The step with rows of one token on row 0 added; they own no output slot."""
    more = rows - len(meta.row_ids)
    zeros, ones = np.zeros(more, dtype=np.int32), np.ones(more, dtype=np.int32)
    return replace(
        meta,
        query_starts=np.arange(rows + 1, dtype=np.int32),
        seq_lens=np.concatenate((meta.seq_lens, ones)),
        row_ids=np.concatenate((meta.row_ids, zeros)),
        positions=np.concatenate((meta.positions, zeros)),
    )


def _flatten(plan: StepPlan) -> list[mx.array]:
    """The arrays of a padded plan in a fixed order."""
    arrays: list[Any] = [plan.tail_start]
    for (part,) in plan.decode.values():
        arrays += [part.slots, part.places, part.pool_counts, part.tail_counts, part.mask]
    return arrays


def _unflatten(kinds: tuple[Any, ...], arrays: list[mx.array]) -> StepPlan:
    plan = StepPlan(arrays[0], (), None, None)
    for index, kind in enumerate(kinds):
        plan.decode[kind] = (DecodePart(*arrays[1 + 5 * index : 6 + 5 * index]),)
    return plan
