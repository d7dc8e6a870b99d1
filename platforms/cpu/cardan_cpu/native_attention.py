"""The attention backend ``native``: kernels that read keys and values by slot, for prefill and decode alike.

It knows no model and no scheduler. What a step's rows are stands in tensors that kernels read when they run, so that a
recorded step follows a plan that was filled anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cardan.platform import AttentionBackend, AttentionMeta
from cardan.types import Int32Array, LayerKV
from cardan_cpu.native_kv_pool import NativeKVPool
from cardan_native import Kernels, Tensor

NO_SLOT = -1
"""Output slot of tokens that are not written."""


@dataclass(frozen=True, slots=True)
class NativePlan:
    """A step's rows; all int32 tensors, whose memory stays where it is when they are filled anew.

    Attributes:
        row_ids: ``[rows]``, row of the tables.
        query_starts: ``[rows + 1]``, first token of each row.
        seq_lens: ``[rows]``, after the step; 0 for rows that only fill up.
        positions: ``[tokens]``.
        out_slots: ``[groups, tokens]``; negative for tokens that are not written.
        groups: the rows as the kernels take them, for each KV group.
    """

    row_ids: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    positions: Tensor
    out_slots: Tensor
    groups: tuple[Any, ...]

    @property
    def num_rows(self) -> int:
        """Rows, those that only fill up among them."""
        return self.row_ids.shape[0]

    def refill(self, meta: AttentionMeta) -> None:
        """Take the rows of another decode step, and fill up to as many as there were.

        Raises:
            ValueError: the step has more rows, or rows of several tokens.
        """
        count, rows = len(meta.row_ids), self.num_rows
        if count > rows or len(meta.positions) != count or self.positions.shape[0] != rows:
            raise ValueError(
                f"A plan of {rows} rows takes up to {rows} rows of one token each, got {count} rows of "
                f"{len(meta.positions)} tokens. Make a plan of that size."
            )
        self.row_ids.copy_bits(_filled(meta.row_ids, rows, 0))
        self.seq_lens.copy_bits(_filled(meta.seq_lens, rows, 0))
        self.positions.copy_bits(_filled(meta.positions, rows, 0))
        self.out_slots.copy_bits(_filled(meta.out_slots, rows, NO_SLOT))


class NativeAttention(AttentionBackend):
    """Attention in the native kernels; a row's result does not depend on its batch mates."""

    name = "native"

    def __init__(self, pool: NativeKVPool) -> None:
        self.pool = pool
        self.native: Kernels = pool.native

    def plan(self, meta: AttentionMeta) -> NativePlan:
        """Copy the step's rows to tensors."""
        return self._plan(meta.row_ids, meta.query_starts, meta.seq_lens, meta.positions, meta.out_slots)

    def fixed_plan(self, rows: int) -> NativePlan:
        """A decode plan of ``rows`` rows that only fill up, to be recorded with and filled before each replay."""
        zeros = np.zeros(rows, dtype=np.int32)
        no_slots = np.full((self.pool.tables.shape[0], rows), NO_SLOT, dtype=np.int32)
        return self._plan(zeros, np.arange(rows + 1, dtype=np.int32), zeros, zeros, no_slots)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerKV, plan: NativePlan, sinks: Tensor | None = None
    ) -> Tensor:
        """See ``AttentionBackend.forward``."""
        keys, values = self.pool.keys[layer.index], self.pool.values[layer.index]
        scales = self.pool.scales(layer)
        self.native.write_kv(k, v, keys, values, plan.out_slots, layer.group, **scales)
        rows, window, softcap = plan.groups[layer.group], layer.window or 0, layer.softcap or 0.0
        out: Tensor = self.native.attention(q, keys, values, rows, layer.scale, window, softcap, sinks, **scales)
        return out

    def _plan(self, *arrays: Int32Array) -> NativePlan:
        make, rows = self.native.Tensor.from_bits, self.native.AttentionRows
        row_ids, starts, lengths, positions, out_slots = (
            make(np.ascontiguousarray(array, dtype=np.int32), "int32") for array in arrays
        )
        groups = tuple(
            rows(self.pool.tables, group, row_ids, starts, lengths) for group in range(self.pool.tables.shape[0])
        )
        return NativePlan(row_ids, starts, lengths, positions, out_slots, groups)


def _filled(values: Int32Array, count: int, fill: int) -> Int32Array:
    """The last axis extended to ``count`` entries."""
    if values.shape[-1] == count and values.dtype == np.int32:
        return np.ascontiguousarray(values)
    out = np.full((*values.shape[:-1], count), fill, dtype=np.int32)
    out[..., : values.shape[-1]] = values
    return out
