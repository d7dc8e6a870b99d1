"""Keys and values of all slots as torch tensors, and the device's row-to-slot tables.

It does not know attention; it knows layout only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cardan.platform import OpsKVPool
from cardan.types import KVLayout, TableDelta
from cardan_torch.tensors import torch_dtype


class TorchKVPool(OpsKVPool):
    """One zeroed tensor for keys and one for values per layer: ``[slots, kv_heads, dim]``.

    Zeros keep every slot finite before it is first written, so that a masked slot can never poison a result.

    Attributes:
        keys: one tensor per layer.
        values: one tensor per layer.
        tables: int64 ``[groups, rows, max_length]``; slot of each position of each row.
    """

    def __init__(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int, device: torch.device) -> None:
        dtype = torch_dtype(layout.dtype)
        self.keys = [
            torch.zeros((num_slots, layer.kv_heads, layer.k_dim), dtype=dtype, device=device) for layer in layout.layers
        ]
        self.values = [
            torch.zeros((num_slots, layer.kv_heads, layer.v_dim), dtype=dtype, device=device) for layer in layout.layers
        ]
        self.tables = torch.zeros((layout.num_groups, num_rows, max_length), dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(leaf.nbytes for leaf in self.leaves())

    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Keys of all layers, then values of all layers."""
        return (*self.keys, *self.values)

    def bind(self, leaves: Sequence[torch.Tensor]) -> None:
        """Replace the tensors, in the order of ``leaves``."""
        half = len(self.keys)
        self.keys, self.values = list(leaves[:half]), list(leaves[half:])

    def update_tables(self, deltas: Sequence[TableDelta]) -> None:
        """Write each delta's slots to its row."""
        for delta in deltas:
            slots = torch.from_numpy(delta.slots.astype("int64")).to(self.tables.device)
            self.tables[:, delta.row_id, delta.start : delta.start + slots.shape[1]] = slots
