"""Keys and values of all slots on a GPU, and the row-to-slot tables that kernels read.

It does not know attention; it knows layout only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from cardan.errors import UnsupportedError
from cardan.types import KVLayout, LayerKV, TableDelta, TableDeltas
from cardan_torch.gpu.accelerator import Accelerator
from cardan_torch.kv_pool import FLOAT8_KV, LayerTensors

KV_TYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    **FLOAT8_KV,
}
"""Of floats of 8 bits the kernels know every form on every chip, so that all platforms round keys and values alike."""


class GpuKVPool(LayerTensors):
    """Keys and values that kernels write and read; tensors never move, since captured steps read them.

    Attributes:
        tables: int32 ``[groups, rows, max_length]``; slot of each position of each row.
        page_size: slots of a page, which lie side by side.
        max_length: longest sequence.
    """

    def __init__(self, accelerator: Accelerator, layout: KVLayout, sizes: tuple[int, int, int]) -> None:
        """Allocate.

        Args:
            accelerator: where.
            layout: what a slot holds.
            sizes: slots, rows of the tables, longest sequence.

        Raises:
            UnsupportedError: the kernels do not read the layout's element type.
        """
        if layout.dtype not in KV_TYPES:
            raise UnsupportedError(
                f"The KV dtype must be one of {', '.join(KV_TYPES)} on {accelerator.chip.name}, got {layout.dtype!r}. "
                "Pass one of these with --kv-cache-dtype."
            )
        num_slots, num_rows, self.max_length = sizes
        self._accelerator = accelerator
        self.page_size = layout.page_size

        def zeros(width: tuple[int, int]) -> torch.Tensor:
            return torch.zeros((num_slots, *width), dtype=KV_TYPES[layout.dtype], device=accelerator.device)

        self.keys = [zeros((layer.kv_heads, layer.k_dim)) for layer in layout.layers]
        self.values = [zeros((layer.kv_heads, layer.v_dim)) for layer in layout.layers]
        self.tables = torch.zeros(
            (layout.num_groups, num_rows, self.max_length), dtype=torch.int32, device=accelerator.device
        )

    @property
    def num_rows(self) -> int:
        """Rows of the tables."""
        return self.tables.shape[1]

    @property
    def num_groups(self) -> int:
        """KV groups."""
        return self.tables.shape[0]

    def pages(self, layer: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values page by page: ``[pages, page_size, kv_heads, dim]``."""
        keys, values = self.keys[layer.index], self.values[layer.index]
        shape = (-1, self.page_size, layer.kv_heads)
        return keys.view(*shape, layer.k_dim), values.view(*shape, layer.v_dim)

    def update_tables(self, deltas: Sequence[TableDelta]) -> None:
        """Write slots to their rows, by one copy and one scatter."""
        flat = TableDeltas.of(deltas)
        count = len(flat.rows)
        if count == 0:
            return
        packed = np.empty((2 + self.num_groups, count), dtype=np.int64)
        packed[0], packed[1], packed[2:] = flat.rows, flat.positions, flat.slots
        moved = self._accelerator.upload(packed)
        self.tables[:, moved[0], moved[1]] = moved[2:].to(torch.int32)
