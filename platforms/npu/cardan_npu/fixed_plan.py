"""A plan of decode rows over memory that stays, so that a captured step finds each step's integers where they were.

It knows no graph and no model; it knows which integers a decode step has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from cardan.platform import AttentionMeta
from cardan.types import Int32Array, LayerKV
from cardan_npu.attention_plan import HostRows, Kind, Rows, full_rows, window_rows, window_width
from cardan_npu.kv_pool import NpuKVPool
from cardan_torch.attention_plan import DecodeGroup, LayerPlan


class FixedTorchPlan:
    """What ``TorchAttention`` takes in the place of its own plan: gathered slots and masks over memory that stays.

    Attributes:
        out_slots: int64 ``[groups, rows]``.
    """

    def __init__(self, pool: NpuKVPool, kinds: Sequence[Kind], rows: int, width: int) -> None:
        """Reserve memory for ``rows`` rows of ``width`` keys."""
        device, groups = pool.tables.device, pool.tables.shape[0]
        self._pool, self._width = pool, width
        self.out_slots = torch.zeros((groups, rows), dtype=torch.int64, device=device)
        self._slots = {kind: torch.zeros(rows * width, dtype=torch.int64, device=device) for kind in kinds}
        self._masks = {kind: torch.zeros((rows, 1, 1, width), device=device) for kind in kinds}

    def for_layer(self, group: int, window: int | None, score_heads: int) -> LayerPlan:
        """One group of rows, all of the batch."""
        kind = (group, window)
        return LayerPlan((DecodeGroup(None, self._slots[kind], self._width, self._masks[kind]),), ())

    def refill(self, meta: AttentionMeta) -> None:
        """Bring in a step that has as many rows as there is memory for."""
        self.out_slots.copy_(torch.from_numpy(meta.out_slots.astype(np.int64)))
        lengths = meta.seq_lens.astype(np.int64)
        columns = lengths[:, None] - self._width + np.arange(self._width)
        for (group, window), slots in self._slots.items():
            shown = lengths if window is None else np.minimum(lengths, window)
            hidden = columns < (lengths - shown)[:, None]
            table = self._pool.host_tables[group]
            picked = np.where(hidden, 0, table[meta.row_ids[:, None], np.maximum(columns, 0)])
            slots.copy_(torch.from_numpy(picked.astype(np.int64).reshape(-1)))
            mask = np.where(hidden, -np.inf, 0).astype(np.float32)[:, None, None]
            self._masks[group, window].copy_(torch.from_numpy(mask))


class FixedPlan:
    """A plan for so many decode rows; ``refill`` brings a step in, with one copy for all its integers.

    Attributes:
        single: every row has one query.
        query_ends: behind each row's token.
        positions: int32 ``[rows]``.
        out_slots: int32 ``[groups, rows, 1]``.
        calls: kinds of the fused operator's calls, in the order of their capture.
    """

    def __init__(
        self, pool: NpuKVPool, layers: Sequence[LayerKV], fused: Sequence[bool], rows: int, width: int
    ) -> None:
        """Reserve memory.

        Args:
            pool: that the step reads.
            layers: of the model.
            fused: which of them the fused operator takes.
            rows: of the step.
            width: keys that the other layers gather for each row.
        """
        kinds = [(layer.group, layer.window) for layer in layers]
        taken = list(dict.fromkeys(kind for kind, by_operator in zip(kinds, fused, strict=True) if by_operator))
        others = list(dict.fromkeys(kind for kind, by_operator in zip(kinds, fused, strict=True) if not by_operator))
        device, groups, max_length = pool.tables.device, pool.tables.shape[0], pool.tables.shape[2]
        self._pool, self._num_rows = pool, rows
        self.single = True
        self.query_ends = list(range(1, rows + 1))
        self.calls: list[Kind] = []
        most = -(-max_length // pool.page_size)
        widths = [most if window is None else min(most, window_width(window, pool.page_size)) for _, window in taken]
        shapes = [(rows,), (groups, rows), *((rows, wide) for wide in widths)]
        self._sizes = [int(np.prod(shape)) for shape in shapes]
        self._buffer = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        self.positions, out_slots, *tables = (
            part.view(shape)
            for part, shape in zip(torch.split_with_sizes(self._buffer, self._sizes), shapes, strict=True)
        )
        self.out_slots = out_slots[:, :, None]
        self._kinds = {
            kind: Rows(table, [1] * rows, _mask(kind, rows, table.shape[1] * pool.page_size, device), (slice(0, rows),))
            for kind, table in zip(taken, tables, strict=True)
        }
        self._torch = FixedTorchPlan(pool, others, rows, width) if others else None

    def rows(self, kind: Kind) -> Rows:
        """See ``EagerPlan.rows``."""
        self.calls.append(kind)
        return self._kinds[kind]

    def torch_plan(self) -> FixedTorchPlan:
        """See ``EagerPlan.torch_plan``."""
        assert self._torch is not None
        return self._torch

    def updates(self) -> list[dict[str, list[int]]]:
        """Lengths for each captured call of the fused operator."""
        return [{"actual_seq_lengths_kv": self._kinds[kind].lengths} for kind in self.calls]

    def refill(self, meta: AttentionMeta) -> None:
        """Bring a step in; rows that fill up are one token on the padding page."""
        meta = _filled_up(meta, self._num_rows)
        parts = [meta.positions, meta.out_slots.reshape(-1)]
        for (group, window), rows in self._kinds.items():
            host = (
                full_rows(self._pool, meta, group) if window is None else window_rows(self._pool, meta, group, window)
            )
            parts.append(_widened(host, rows.blocks.shape[1]).reshape(-1))
            rows.lengths[:] = host.lengths
            if rows.mask is not None and host.hidden is not None:
                hidden = np.zeros((self._num_rows, rows.mask.shape[-1]), dtype=np.bool_)
                hidden[:, : host.hidden.shape[1]] = host.hidden
                rows.mask.copy_(torch.from_numpy(hidden[:, None, None]))
        self._buffer.copy_(torch.from_numpy(np.concatenate(parts).astype(np.int32, copy=False)))
        if self._torch is not None:
            self._torch.refill(meta)


def _mask(kind: Kind, rows: int, keys: int, device: torch.device) -> torch.Tensor | None:
    return None if kind[1] is None else torch.zeros((rows, 1, 1, keys), dtype=torch.bool, device=device)


def _widened(host: HostRows, width: int) -> Int32Array:
    blocks = np.zeros((len(host.blocks), width), dtype=np.int32)
    blocks[:, : host.blocks.shape[1]] = host.blocks
    return blocks


def _filled_up(meta: AttentionMeta, rows: int) -> AttentionMeta:
    """The step with rows of one token on row 0 added; what they write goes to slot 0, which is padding."""
    more = rows - len(meta.row_ids)
    zeros = np.zeros(more, dtype=np.int32)
    return replace(
        meta,
        query_starts=np.arange(rows + 1, dtype=np.int32),
        seq_lens=np.concatenate((meta.seq_lens, zeros + 1)),
        row_ids=np.concatenate((meta.row_ids, zeros)),
        positions=np.concatenate((meta.positions, zeros)),
        out_slots=np.concatenate((meta.out_slots, np.zeros((len(meta.out_slots), more), dtype=np.int32)), axis=1),
    )
