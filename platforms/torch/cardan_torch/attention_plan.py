"""One step's attention, worked out once for all layers: which rows go together, which slots they read, which masks.

It knows no layer's arrays; what differs between layers (group and window) is planned when a layer first asks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from cardan.platform import AttentionMeta
from cardan.types import ForwardMode

SHORTEST_SHARE = 0.6
"""Rows whose length is below this share of the longest of a decode group start a group of their own."""

BLOCK_BYTES = 64 * 2**20
"""Bound on any mask or score matrix of one block of queries."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of like length that are attended to in one call.

    Attributes:
        tokens: int64 ``[rows]``, their tokens in the batch; None when they are all tokens, in order.
        slots: int64 ``[rows * width]``, slots read, right-aligned; padding reads slot 0.
        width: keys per row.
        mask: float32 ``[rows, 1, 1, width]``, 0 or ``-inf``; None when there is no padding.
    """

    tokens: torch.Tensor | None
    slots: torch.Tensor
    width: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ExtendBlock:
    """A block of one row's new tokens.

    Attributes:
        start: first token in the batch.
        stop: behind its last token.
        first_key: of the row's gathered keys, the first one that any query of the block sees.
        last_key: behind the last one.
        mask: float32 ``[queries, keys]``, 0 or ``-inf``; None when plain causal order says it all.
    """

    start: int
    stop: int
    first_key: int
    last_key: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """One row with several new tokens: the slots of its keys, and blocks of its queries."""

    slots: torch.Tensor
    blocks: tuple[ExtendBlock, ...]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """All that the layers of one group and window share."""

    decode: tuple[DecodeGroup, ...]
    extend: tuple[ExtendRow, ...]


@dataclass(slots=True)
class StepPlan:
    """A step's plan, filled in as layers of new kinds ask.

    Attributes:
        meta: the step.
        tables: int64 ``[groups, rows, max_length]`` of the pool.
        out_slots: int64 ``[groups, tokens]`` on the device.
        score_heads: query heads times bytes a score takes where scores are materialised.
    """

    meta: AttentionMeta
    tables: torch.Tensor
    out_slots: torch.Tensor
    decode_rows: np.ndarray[tuple[int], np.dtype[np.int64]]
    extend_rows: np.ndarray[tuple[int], np.dtype[np.int64]]
    layers: dict[tuple[int, int | None, int], LayerPlan] = field(default_factory=dict)

    def for_layer(self, group: int, window: int | None, score_heads: int) -> LayerPlan:
        """The plan of layers of a group with a window.

        Args:
            group: KV group.
            window: how far back a query sees; None sees all.
            score_heads: query heads whose scores are materialised, or 0 where a fused kernel keeps none.
        """
        key = (group, window, score_heads)
        found = self.layers.get(key)
        if found is None:
            table = self.tables[group]
            found = LayerPlan(
                tuple(_decode_group(self, table, rows, window) for rows in _groups_by_length(self)),
                tuple(_extend_row(self.meta, table, int(row), window, score_heads) for row in self.extend_rows),
            )
            self.layers[key] = found
        return found


def plan_step(meta: AttentionMeta, tables: torch.Tensor) -> StepPlan:
    """Sort a step's rows into those with one new token and those with several."""
    counts = np.diff(meta.query_starts)
    out_slots = torch.from_numpy(meta.out_slots.astype(np.int64)).to(tables.device)
    if meta.mode is ForwardMode.DECODE:
        decode, extend = np.arange(len(counts)), np.empty(0, dtype=np.int64)
    else:
        decode, extend = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
    return StepPlan(meta, tables, out_slots, decode, extend)


def _groups_by_length(step: StepPlan) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Split the decode rows so that padding stays small; rows keep the batch's order inside a group."""
    rows = step.decode_rows
    if len(rows) == 0:
        return []
    lengths = step.meta.seq_lens[rows]
    if lengths.min() >= SHORTEST_SHARE * lengths.max():
        return [rows]
    order = np.argsort(-lengths, kind="stable")
    groups, first = [], 0
    for place in range(1, len(order) + 1):
        if place == len(order) or lengths[order[place]] < SHORTEST_SHARE * lengths[order[first]]:
            groups.append(np.sort(rows[order[first:place]]))
            first = place
    return groups


def _decode_group(
    step: StepPlan, table: torch.Tensor, rows: np.ndarray[tuple[int], np.dtype[np.int64]], window: int | None
) -> DecodeGroup:
    meta, device = step.meta, table.device
    lengths = meta.seq_lens[rows].astype(np.int64)
    shown = lengths if window is None else np.minimum(lengths, window)
    width = int(shown.max())
    columns = lengths[:, None] - width + np.arange(width)
    hidden = columns < (lengths - shown)[:, None]
    padded = bool(hidden.any())
    row_ids = torch.from_numpy(meta.row_ids[rows].astype(np.int64)).to(device)
    if len(rows) == 1:
        slots = table[int(meta.row_ids[rows[0]]), int(columns[0, 0]) : int(lengths[0])]
    else:
        places = torch.from_numpy(np.where(hidden, 0, columns)).to(device)
        slots = table.index_select(0, row_ids).gather(1, places)
    mask = None
    if padded:
        hidden_on_device = torch.from_numpy(hidden).to(device)
        slots = slots.masked_fill(hidden_on_device, 0)
        mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden_on_device, float("-inf"))[:, None, None]
    all_tokens = len(rows) == int(meta.query_starts[-1])
    tokens = None if all_tokens else torch.from_numpy(meta.query_starts[rows].astype(np.int64)).to(device)
    return DecodeGroup(tokens, slots.reshape(-1), width, mask)


def _extend_row(meta: AttentionMeta, table: torch.Tensor, row: int, window: int | None, score_heads: int) -> ExtendRow:
    start, stop = int(meta.query_starts[row]), int(meta.query_starts[row + 1])
    length = int(meta.seq_lens[row])
    first_position = length - (stop - start)
    oldest = 0 if window is None else max(0, first_position - window + 1)
    slots = table[int(meta.row_ids[row]), oldest:length]
    causal = first_position == 0 and (window is None or window >= length)
    if causal and score_heads == 0:
        return ExtendRow(slots, (ExtendBlock(start, stop, 0, length, None),))
    step = max(1, BLOCK_BYTES // (4 * max(score_heads, 1) * (length - oldest)))
    blocks = []
    for block_start in range(start, stop, step):
        block_stop = min(block_start + step, stop)
        begin, end = (first_position + token - start for token in (block_start, block_stop))
        first_key = 0 if window is None else max(oldest, begin - window + 1)
        mask = _mask(np.arange(begin, end), np.arange(first_key, end), window).to(table.device)
        blocks.append(ExtendBlock(block_start, block_stop, first_key - oldest, end - oldest, mask))
    return ExtendRow(slots, tuple(blocks))


def _mask(
    queries: np.ndarray[tuple[int], np.dtype[np.int64]],
    keys: np.ndarray[tuple[int], np.dtype[np.int64]],
    window: int | None,
) -> torch.Tensor:
    """Float32 ``[queries, keys]``: 0 where the position of a query sees that of a key, else ``-inf``."""
    back = torch.from_numpy(queries)[:, None] - torch.from_numpy(keys)
    hidden = back < 0 if window is None else (back < 0) | (back >= window)
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
