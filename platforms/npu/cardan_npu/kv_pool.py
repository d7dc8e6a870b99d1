"""Keys and values of all slots on an NPU, and the row-to-slot tables on both sides.

It does not know attention; it knows layout only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cardan.types import KVLayout, TableDelta, TableDeltas
from cardan_torch import TorchKVPool


class NpuKVPool(TorchKVPool):
    """As on every torch device, with a copy of the tables on the host: block tables are put together there.

    Attributes:
        page_size: slots of a page; a page's slots lie one after the other.
        host_tables: int32 ``[groups, rows, max_length]``.
    """

    def __init__(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int, device: torch.device) -> None:
        """Allocate; ``num_slots`` are whole pages where layouts have pages."""
        super().__init__(layout, num_slots, num_rows, max_length, device)
        self.page_size = layout.page_size
        self.num_slots = num_slots
        self.host_tables = np.zeros((layout.num_groups, num_rows, max_length), dtype=np.int32)

    @property
    def num_pages(self) -> int:
        """Pages of the cache, the padding page included."""
        return self.num_slots // self.page_size

    def update_tables(self, deltas: Sequence[TableDelta]) -> None:
        """See ``OpsKVPool.update_tables``."""
        super().update_tables(deltas)
        if isinstance(deltas, TableDeltas):
            if len(deltas.rows):
                self.host_tables[:, deltas.rows, deltas.positions] = deltas.slots
            return
        for delta in deltas:
            self.host_tables[:, delta.row_id, delta.start : delta.start + delta.slots.shape[1]] = delta.slots

    def flat(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as ``[slots, heads * dim]``."""
        return self.keys[layer].flatten(1), self.values[layer].flatten(1)

    def paged(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as ``[pages, page_size, heads * dim]``."""
        keys, values = self.flat(layer)
        pages = self.num_pages
        return keys.view(pages, self.page_size, -1), values.view(pages, self.page_size, -1)
