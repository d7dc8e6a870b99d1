"""Keys and values of all slots as torch tensors, how they are written and read, and the device's row-to-slot tables.

It does not know attention; it knows layout only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from cardan.platform import OpsKVPool
from cardan.types import KVLayout, LayerKV, TableDelta, TableDeltas
from cardan_torch.tensors import torch_dtype

FLOAT8_KV = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Torch's types for keys and values that are kept as floats of 8 bits."""


class LayerTensors(OpsKVPool):
    """One zeroed tensor for keys and one for values per layer: ``[slots, kv_heads, dim]``.

    Zeros keep every slot finite before it is first written, so that a masked slot can never poison a result.

    Attributes:
        keys: one tensor per layer.
        values: one tensor per layer.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

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


class TorchKVPool(LayerTensors):
    """Keys and values that torch's own ops write and gather.

    Attributes:
        tables: int64 ``[groups, rows, max_length]``; slot of each position of each row.
        is_float8: whether elements are floats of 8 bits, which hold keys and values divided by their layer's scales.
    """

    def __init__(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int, device: torch.device) -> None:
        """Reserve the memory.

        Raises:
            UnsupportedError: torch has no such type, or codes of it need scales beside them.
        """
        dtype = FLOAT8_KV.get(layout.dtype) or torch_dtype(layout.dtype)
        self.is_float8 = layout.dtype in FLOAT8_KV
        self.keys = [_zeros((num_slots, layer.kv_heads, layer.k_dim), dtype, device) for layer in layout.layers]
        self.values = [_zeros((num_slots, layer.kv_heads, layer.v_dim), dtype, device) for layer in layout.layers]
        self.tables = _zeros((layout.num_groups, num_rows, max_length), torch.int64, device)

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: LayerKV, slots: torch.Tensor) -> None:
        """Keep new keys and values, ``[tokens, kv_heads, dim]``; what floats of 8 bits cannot hold is cut."""
        pairs = ((self.keys, k, layer.k_scale), (self.values, v, layer.v_scale))
        for pool, new, scale in ((kept[layer.index], new, scale) for kept, new, scale in pairs):
            if self.is_float8:
                largest = torch.finfo(pool.dtype).max
                codes = (new.float() / scale).clamp_(-largest, largest).to(pool.dtype)
                pool.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))
            else:
                pool.index_copy_(0, slots, new.to(pool.dtype))

    def gather(self, layer: LayerKV, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of ``slots``, ``[n, kv_heads, dim]``; floats of 8 bits not yet multiplied by their scales."""
        keys, values = self.keys[layer.index], self.values[layer.index]
        if not self.is_float8:
            return keys.index_select(0, slots).to(dtype), values.index_select(0, slots).to(dtype)
        codes = (pool.view(torch.uint8).index_select(0, slots).view(pool.dtype) for pool in (keys, values))
        keys, values = (part.to(dtype) for part in codes)
        return keys, values

    def update_tables(self, deltas: Sequence[TableDelta]) -> None:
        """Write slots to their rows; the flat arrays of ``TableDeltas`` go in one call."""
        device = self.tables.device
        if isinstance(deltas, TableDeltas):
            if len(deltas.rows) == 0:
                return
            rows, positions, slots = (
                torch.from_numpy(array.astype(np.int64)).to(device)
                for array in (deltas.rows, deltas.positions, deltas.slots)
            )
            self.tables[:, rows, positions] = slots
            return
        for delta in deltas:
            slots = torch.from_numpy(delta.slots.astype(np.int64)).to(device)
            self.tables[:, delta.row_id, delta.start : delta.start + slots.shape[1]] = slots


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; in host memory the pages are committed only as they are first touched, which ``torch.zeros`` does not."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).reshape(shape)
