"""One step's attention, worked out on the host: which slots each row reads, from the pool and from the tail.

It knows no layer's arrays. Everything that layers of one KV group and window share is planned once.

Padding lanes of a row read a slot of the row's own, and are masked: so what stands in slots that the row does not own,
be it NaN, cannot reach its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cardan.platform import AttentionMeta
from cardan.types import ForwardMode, Int32Array, KVLayout
from cardan_mlx.kv_pool import TAIL_STEPS, MlxKVPool

Kind: TypeAlias = tuple[int, int | None]
"""KV group and window: what layers must share to share a plan."""

SHORTEST_SHARE = 0.6
"""Decode rows whose length is below this share of the longest of a part start a part of their own."""

SCORE_BYTES = 16 * 2**20
"""Bound on the float32 scores of one block of queries, all heads together. Two blocks may be under way, and each may
hold its scores twice (before and after the softmax), so that 64 MiB bound what attention takes beside its result."""

GATHERED_KEYS = 1 << 18
"""Most keys that one part of a decode step gathers, over all its rows."""

Rows: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodePart:
    """Decode rows of like length that are attended to in one call.

    Attributes:
        slots: int32 ``[rows, width]``, slots of the pool.
        places: int32 ``[rows, tail width]``, tokens of the tail; width 0 when nothing is there.
        pool_counts: int32 ``[rows]``, how many of ``slots`` the row sees; they come first.
        tail_counts: int32 ``[rows]``, the same of ``places``.
        mask: bool ``[rows, 1, 1, width + tail width]``, or None when there is no padding.
    """

    slots: mx.array
    places: mx.array
    pool_counts: mx.array
    tail_counts: mx.array
    mask: mx.array | None


@dataclass(frozen=True, slots=True)
class ExtendBlock:
    """A block of one row's new tokens.

    Attributes:
        start: first token in the batch.
        stop: behind its last token.
        first_key: of the row's gathered keys, the first that any query of the block sees.
        last_key: behind the last one, which is the last query's own.
        mask: bool ``[queries, keys]``; None where causal order says it all.
    """

    start: int
    stop: int
    first_key: int
    last_key: int
    mask: mx.array | None


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """One row with several new tokens: the slots of its keys, and blocks of its queries."""

    slots: mx.array
    blocks: tuple[ExtendBlock, ...]


@dataclass(slots=True)
class StepPlan:
    """A step's plan.

    Attributes:
        tail_start: int32 ``[1]``, where in the tail a decode step writes; None for steps that write to the pool.
        out_slots: int32 ``[tokens]`` per group, for steps that write to the pool.
        token_groups: tokens of each decode part in the batch; None when one part has all tokens in order.
        order: int32 ``[tokens]``, where each token's result stands after parts and rows are joined; None for as is.
        decode: the parts of each kind, in one order for all kinds.
        extend: rows with several tokens, by kind.
    """

    tail_start: mx.array | None
    out_slots: tuple[mx.array, ...]
    token_groups: tuple[mx.array, ...] | None
    order: mx.array | None
    decode: dict[Kind, tuple[DecodePart, ...]] = field(default_factory=dict)
    extend: dict[Kind, tuple[ExtendRow, ...]] = field(default_factory=dict)


class Planner:
    """Plans steps over one pool."""

    def __init__(self, pool: MlxKVPool, layout: KVLayout) -> None:
        self._pool = pool
        self.kinds: tuple[Kind, ...] = tuple(dict.fromkeys((layer.group, layer.window) for layer in layout.layers))
        self._heads = max(layer.q_heads for layer in layout.layers)

    def plan(self, meta: AttentionMeta) -> StepPlan:
        """Plan a step; a decode step writes to the tail, any other waits for what is in flight and writes the pool."""
        if meta.mode is ForwardMode.DECODE:
            return self._plan_decode(meta)
        return self._plan_extend(meta)

    def plan_padded(self, meta: AttentionMeta, width: int) -> StepPlan:
        """Plan a decode step as one part whose rows read ``width`` slots of the pool, for capture.

        Rows beyond those that own an output slot are padding: ``meta`` has them with length 1 on row 0.
        """
        rows = np.arange(len(meta.row_ids))
        start = self._pool.reserve_tail(meta.out_slots, len(rows))
        plan = StepPlan(mx.array([start], dtype=mx.int32), (), None, None)
        for kind in self.kinds:
            plan.decode[kind] = (self._part(meta, rows, kind, padded_to=width),)
        return plan

    def _plan_decode(self, meta: AttentionMeta) -> StepPlan:
        rows = np.arange(len(meta.row_ids))
        start = self._pool.reserve_tail(meta.out_slots, len(rows))
        groups = list(_groups_by_length(meta.seq_lens, rows))
        plan = StepPlan(mx.array([start], dtype=mx.int32), (), None, None)
        if len(groups) > 1:
            plan.token_groups = tuple(mx.array(group.astype(np.int32)) for group in groups)
            plan.order = mx.array(np.argsort(np.concatenate(groups)).astype(np.int32))
        for kind in self.kinds:
            plan.decode[kind] = tuple(self._part(meta, group, kind) for group in groups)
        return plan

    def _plan_extend(self, meta: AttentionMeta) -> StepPlan:
        self._pool.fold()
        counts = np.diff(meta.query_starts)
        single, several = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
        groups = list(_groups_by_length(meta.seq_lens, single))
        plan = StepPlan(None, tuple(mx.array(slots) for slots in meta.out_slots), None, None)
        tokens = [meta.query_starts[group] for group in groups]
        plan.token_groups = tuple(mx.array(group.astype(np.int32)) for group in tokens)
        tokens += [np.arange(meta.query_starts[row], meta.query_starts[row + 1]) for row in several]
        joined = np.concatenate(tokens)
        if (np.diff(joined) != 1).any():
            plan.order = mx.array(np.argsort(joined).astype(np.int32))
        for kind in self.kinds:
            plan.decode[kind] = tuple(self._part(meta, group, kind) for group in groups)
            plan.extend[kind] = tuple(self._extend_row(meta, int(row), kind) for row in several)
        return plan

    def _part(self, meta: AttentionMeta, rows: Rows, kind: Kind, padded_to: int | None = None) -> DecodePart:
        group, window = kind
        table = self._pool.tables[group]
        row_ids, lengths = meta.row_ids[rows].astype(np.int64)[:, None], meta.seq_lens[rows].astype(np.int64)[:, None]
        shown = lengths if window is None else np.minimum(lengths, window)
        tail, tail_width = self._tail_counts(meta, rows, group, padded_to is not None)
        tail_shown = np.minimum(tail, shown)
        pooled = shown - tail_shown
        width = max(int(pooled.max()), 1) if padded_to is None else padded_to
        lanes = np.arange(width)
        # the newest slot of the pool that is the row's own; a row that is in the tail altogether has slot 0
        own = np.where(lengths > tail, table[row_ids, np.maximum(lengths - tail - 1, 0)], 0)
        slots = np.where(lanes < pooled, table[row_ids, np.minimum(lengths - shown + lanes, table.shape[1] - 1)], own)
        tail_lanes = np.arange(tail_width)
        newest = lengths - 1
        tail_positions = np.where(tail_lanes < tail_shown, lengths - tail_shown + tail_lanes, newest)
        places = self._places(meta, rows, group, table[row_ids, tail_positions]) if tail_width else tail_positions
        seen = np.concatenate((lanes < pooled, tail_lanes < tail_shown), axis=1)
        mask = None if padded_to is None and seen.all() else mx.array(seen[:, None, None])
        return DecodePart(mx.array(slots), _int32(places), _int32(pooled[:, 0]), _int32(tail_shown[:, 0]), mask)

    def _tail_counts(self, meta: AttentionMeta, rows: Rows, group: int, padded: bool) -> tuple[Rows, int]:
        """How many of each row's newest tokens are in the tail, ``[rows, 1]``, and the width that holds them."""
        steps = self._pool.tail_steps
        if steps == 0:
            return np.zeros((len(rows), 1), dtype=np.int64), 0
        lengths = meta.seq_lens[rows].astype(np.int64)[:, None]
        back = lengths - 1 - np.arange(min(steps, self._pool.tables.shape[2]))
        slots = self._pool.tables[group][meta.row_ids[rows].astype(np.int64)[:, None], np.maximum(back, 0)]
        inside = (self._pool.tail_places(group, slots) >= 0) & (back >= 0)
        counts = np.cumprod(inside, axis=1).sum(axis=1, keepdims=True)
        counts[rows >= meta.out_slots.shape[1]] = 1
        return counts, TAIL_STEPS if padded else int(counts.max())

    def _places(self, meta: AttentionMeta, rows: Rows, group: int, slots: Int32Array) -> Int32Array:
        """Tokens of the tail that hold ``slots``; a padding row reads the one that it writes."""
        places = self._pool.tail_places(group, slots)
        padding = rows >= meta.out_slots.shape[1]
        if padding.any():
            places[padding] = self._pool.last_start + rows[padding][:, None]
        return places

    def _extend_row(self, meta: AttentionMeta, row: int, kind: Kind) -> ExtendRow:
        group, window = kind
        start, stop = int(meta.query_starts[row]), int(meta.query_starts[row + 1])
        length = int(meta.seq_lens[row])
        first_position = length - (stop - start)
        oldest = 0 if window is None else max(0, first_position - window + 1)
        slots = mx.array(self._pool.tables[group][int(meta.row_ids[row]), oldest:length])
        size = max(1, SCORE_BYTES // (4 * self._heads * (length - oldest)))
        blocks = []
        for block_start in range(start, stop, size):
            block_stop = min(block_start + size, stop)
            begin, end = (first_position + token - start for token in (block_start, block_stop))
            first_key = oldest if window is None else max(oldest, begin - window + 1)
            mask = None
            if window is not None and end - first_key > window:
                back = np.arange(begin, end)[:, None] - np.arange(first_key, end)
                mask = mx.array((back >= 0) & (back < window))
            blocks.append(ExtendBlock(block_start, block_stop, first_key - oldest, end - oldest, mask))
        return ExtendRow(slots, tuple(blocks))


def _int32(values: npt.NDArray[Any]) -> mx.array:
    return mx.array(values.astype(np.int32))


def _groups_by_length(lengths: Int32Array, rows: Rows) -> Iterator[Rows]:
    """Split decode rows so that padding and what is gathered at once stay small."""
    if len(rows) == 0:
        return
    longest = int(lengths[rows].max())
    if lengths[rows].min() >= SHORTEST_SHARE * longest and longest * len(rows) <= GATHERED_KEYS:
        yield rows
        return
    order = rows[np.argsort(-lengths[rows], kind="stable")]
    first = 0
    for place in range(1, len(order) + 1):
        longest = int(lengths[order[first]])
        full = (place - first + 1) * longest > GATHERED_KEYS
        if place == len(order) or full or lengths[order[place]] < SHORTEST_SHARE * longest:
            yield np.sort(order[first:place])
            first = place
