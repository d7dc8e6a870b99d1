"""Keys and values of all slots, and the row-to-slot tables, in the memory of the native kernels.

It does not know attention; it knows layout only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cardan.errors import UnsupportedError
from cardan.platform import OpsKVPool
from cardan.types import KV_SCALE_BYTES, KVLayout, LayerKV, TableDelta, TableDeltas
from cardan_native import Kernels, Tensor

KV_DTYPES = ("float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8")


class NativeKVPool(OpsKVPool):
    """One zeroed tensor for keys and one for values per layer: ``[slots, kv_heads, dim]``.

    Those of int8 have a float32 scale for each slot and head beside them. Memory is committed page by page as it is
    first written. Zeros keep every slot finite before that.

    Attributes:
        native: the kernels.
        keys: one tensor per layer.
        values: one tensor per layer.
        key_scales: one tensor ``[slots, kv_heads]`` per layer for int8, else none.
        value_scales: likewise.
        tables: int32 ``[groups, rows, max_length]``; slot of each position of each row.
    """

    def __init__(self, native: Kernels, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> None:
        """Reserve the memory.

        Raises:
            UnsupportedError: the kernels do not read the layout's element type.
        """
        if layout.dtype not in KV_DTYPES:
            known = ", ".join(KV_DTYPES)
            raise UnsupportedError(
                f"The KV dtype must be one of {known} for the native kernels, got {layout.dtype!r}. Pass one of these."
            )
        self.native = native
        self._num_slots = num_slots
        self._eight_bit_floats = layout.dtype.startswith("fp8")
        zeros = native.Tensor.zeros
        self.keys = [zeros([num_slots, layer.kv_heads, layer.k_dim], layout.dtype) for layer in layout.layers]
        self.values = [zeros([num_slots, layer.kv_heads, layer.v_dim], layout.dtype) for layer in layout.layers]
        scaled = layout.layers if layout.dtype in KV_SCALE_BYTES else ()
        self.key_scales = [zeros([num_slots, layer.kv_heads], "float32") for layer in scaled]
        self.value_scales = [zeros([num_slots, layer.kv_heads], "float32") for layer in scaled]
        self.tables = zeros([layout.num_groups, num_rows, max_length], "int32")

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values, and of their scales."""
        return sum(leaf.nbytes for leaf in self.leaves())

    def leaves(self) -> tuple[Tensor, ...]:
        """Keys of all layers, then values of all layers, then the scales of both in the same order."""
        return (*self.keys, *self.values, *self.key_scales, *self.value_scales)

    def scales(self, layer: LayerKV) -> dict[str, Tensor | float]:
        """What the kernels take beside a layer's keys and values."""
        if not self.key_scales:
            return {"key_scale": layer.k_scale, "value_scale": layer.v_scale} if self._eight_bit_floats else {}
        return {"key_scales": self.key_scales[layer.index], "value_scales": self.value_scales[layer.index]}

    def bind(self, leaves: Sequence[Tensor]) -> None:
        """Replace the tensors, in the order of ``leaves``."""
        count = len(self.keys)
        parts = [list(leaves[first : first + count]) for first in range(0, 4 * count, count)]
        self.keys, self.values, self.key_scales, self.value_scales = parts

    def update_tables(self, deltas: Sequence[TableDelta]) -> None:
        """Write slots to their rows, all in one call.

        Raises:
            ValueError: a row, a position or a slot is outside; then nothing is written.
        """
        flat = deltas if isinstance(deltas, TableDeltas) else _flatten(deltas)
        if flat is not None and len(flat.rows):
            self.native.write_table(
                self.tables,
                np.ascontiguousarray(flat.rows, dtype=np.int32),
                np.ascontiguousarray(flat.positions, dtype=np.int32),
                np.ascontiguousarray(flat.slots, dtype=np.int32),
                self._num_slots,
            )


def _flatten(deltas: Sequence[TableDelta]) -> TableDeltas | None:
    """Changes run by run as flat arrays; None when there are none."""
    if not deltas:
        return None
    counts = [delta.slots.shape[1] for delta in deltas]
    return TableDeltas(
        rows=np.repeat(np.array([delta.row_id for delta in deltas], dtype=np.int32), counts),
        positions=np.concatenate(
            [
                np.arange(delta.start, delta.start + count, dtype=np.int32)
                for delta, count in zip(deltas, counts, strict=True)
            ]
        ),
        slots=np.concatenate([delta.slots for delta in deltas], axis=1),
    )
