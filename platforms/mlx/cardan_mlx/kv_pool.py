"""Keys and values of all slots as MLX arrays, with a tail for what decode steps add, and the row-to-slot tables.

It does not know attention; it knows layout only.

MLX is functional: a write makes a new array, and reuses the old one's memory only if nothing else reads it. A step in
flight reads the pool, so a write into the pool for the next step would copy all of it. Decode steps therefore write
to a small tail and only read the pool. Every so often the tail is folded into the pool; before that, and before a
prefill writes to the pool directly, the device waits for what is in flight, so that the memory is reused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cardan.platform import OpsKVPool
from cardan.types import Int32Array, KVLayout, LayerKV, TableDelta, TableDeltas
from cardan_mlx.arrays import mlx_dtype

TAIL_STEPS = 16
"""Decode steps between two folds, where the tail has room for them."""

TAIL_SHARE = 128
"""The tail holds at most one of this many parts of the pool, or the rows of one step where those are more."""


class MlxKVPool(OpsKVPool):
    """One array for keys and one for values per layer, ``[slots, kv_heads, dim]``, and tails of the same kind.

    Attributes:
        layout: what it holds.
        keys: one array per layer.
        values: one array per layer.
        tail_keys: one array ``[tail tokens, kv_heads, k_dim]`` per layer.
        tail_values: one array per layer.
        tables: int32 ``[groups, rows, max_length]`` on the host; slot of each position of each row.
        place: int32 ``[groups, slots]`` on the host; where in the tail a slot's newest KV is, or -1.
        tail_tokens: tokens that the tail holds.
        last_start: first token of the tail that the last decode step writes.
    """

    def __init__(
        self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int, settle: Callable[[], None]
    ) -> None:
        """Allocate zeros.

        Args:
            layout: what it holds.
            num_slots: slots, the padding page included.
            num_rows: rows of the tables.
            max_length: longest sequence.
            settle: waits for everything in flight.
        """
        dtype = mlx_dtype(layout.dtype)
        self.layout = layout
        self._settle = settle
        tail = max(num_rows, min(TAIL_STEPS * num_rows, num_slots // TAIL_SHARE))
        self.tail_tokens = tail

        def zeros(tokens: int, layer: LayerKV, dim: int) -> mx.array:
            return mx.zeros((tokens, layer.kv_heads, dim), dtype=dtype)

        layers = layout.layers
        self.keys = [zeros(num_slots, layer, layer.k_dim) for layer in layers]
        self.values = [zeros(num_slots, layer, layer.v_dim) for layer in layers]
        self.tail_keys = [zeros(tail, layer, layer.k_dim) for layer in layers]
        self.tail_values = [zeros(tail, layer, layer.v_dim) for layer in layers]
        mx.eval(self.leaves())
        self.tables = np.zeros((layout.num_groups, num_rows, max_length), dtype=np.int32)
        self.place = np.full((layout.num_groups, num_slots), -1, dtype=np.int32)
        self._tail_slots = np.full((layout.num_groups, tail), -1, dtype=np.int32)
        self._tail_count = 0
        self._tail_steps = 0
        self.last_start = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values, tails included."""
        return sum(int(leaf.nbytes) for leaf in self.leaves())

    @property
    def tail_steps(self) -> int:
        """Decode steps in the tail: no row has more tokens there."""
        return self._tail_steps

    def leaves(self) -> tuple[mx.array, ...]:
        """Keys of all layers, values of all layers, then their tails in the same order."""
        return (*self.keys, *self.values, *self.tail_keys, *self.tail_values)

    def bind(self, leaves: Sequence[mx.array]) -> None:
        """Replace the arrays, in the order of ``leaves``."""
        count = len(self.keys)
        parts = [list(leaves[first : first + count]) for first in range(0, 4 * count, count)]
        self.keys, self.values, self.tail_keys, self.tail_values = parts

    def update_tables(self, deltas: Sequence[TableDelta]) -> None:
        """Write slots to their rows."""
        flat = TableDeltas.of(deltas)
        self.tables[:, flat.rows, flat.positions] = flat.slots

    def reserve_tail(self, out_slots: Int32Array, width: int) -> int:
        """Take ``width`` tokens of the tail for one decode step, folding it first when it is full.

        Args:
            out_slots: int32 ``[groups, rows]``, the slot that each row's token belongs to.
            width: at least the number of rows; what is beyond them is padding that no slot owns.

        Returns:
            The first token of the tail that the step writes.
        """
        if self._tail_steps == TAIL_STEPS or self._tail_count + width > self.tail_tokens:
            self.fold()
        start, rows = self._tail_count, out_slots.shape[1]
        self._tail_slots[:, start : start + rows] = out_slots
        self._tail_slots[:, start + rows : start + width] = -1
        places = np.arange(start, start + rows, dtype=np.int32)
        for group, slots in enumerate(out_slots):
            self.place[group, slots] = places
        self._tail_count += width
        self._tail_steps += 1
        self.last_start = start
        return start

    def fold(self) -> None:
        """Describe the move of the tail into the pool; what is in flight is waited for, so that no pool is copied."""
        self._settle()
        if self._tail_count == 0:
            return
        for group in range(self.layout.num_groups):
            slots = self._tail_slots[group, : self._tail_count]
            slots = slots[slots >= 0]
            # a slot that was written twice gets its newest KV twice, so that their order does not matter
            source, target = mx.array(self.place[group, slots]), mx.array(slots)
            for index, layer in enumerate(self.layout.layers):
                if layer.group == group and len(slots):
                    self.keys[index][target] = mx.take(self.tail_keys[index], source, axis=0)
                    self.values[index][target] = mx.take(self.tail_values[index], source, axis=0)
            self.place[group, slots] = -1
        self._tail_count = self._tail_steps = 0

    def write(self, layer: LayerKV, slots: mx.array, keys: mx.array, values: mx.array) -> None:
        """Describe a write of ``[tokens, kv_heads, dim]`` to the pool; call ``fold`` once a step before the first."""
        index = layer.index
        self.keys[index][slots] = keys.astype(self.keys[index].dtype)
        self.values[index][slots] = values.astype(self.values[index].dtype)

    def write_tail(self, layer: LayerKV, start: mx.array, keys: mx.array, values: mx.array) -> None:
        """Describe a write of a decode step's keys and values to the tail, from token ``start: int32 [1]`` on."""
        index = layer.index
        for tails, new in ((self.tail_keys, keys), (self.tail_values, values)):
            tails[index] = mx.slice_update(tails[index], new.astype(tails[index].dtype), start, axes=(0,))

    def tail_places(self, group: int, slots: npt.NDArray[Any]) -> Int32Array:
        """Where in the tail the newest KV of ``slots`` is, -1 for those that are in the pool."""
        return np.asarray(self.place[group][slots], dtype=np.int32)
