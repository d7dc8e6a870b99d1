"""Where one layer's keys and values stand, and the table that finds those of a row.

It knows no kernel and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cardan.errors import UnsupportedError
from cardan_kernels.kv_formats import KVFormat, kv_format


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One layer's keys and values, and the table that finds those of a row.

    Attributes:
        keys: ``[slots, kv_heads, k_dim]`` float32, bfloat16, float16, ``float8_e4m3fn``, ``float8_e4m3fnuz`` or
            ``float8_e5m2``; the last axis is contiguous.
        values: ``[slots, kv_heads, v_dim]`` of the same type.
        table: int32 or int64 ``[table_rows, columns]``. With ``page_size`` 1 column ``p`` of a row holds the slot of
            its position ``p``, whatever the pages are; else column ``p // page_size`` holds the page, and the slot is
            ``page * page_size + p % page_size``. Entries behind a row's end are not read.
        page_size: positions that a column of the table stands for; a power of two.
        k_scale: what keys that are floats of 8 bits are multiplied by, in float32; other types do not use it.
        v_scale: likewise for values.
    """

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    page_size: int = 1
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise UnsupportedError(
                f"page_size of a table of pages must be a power of two, got {self.page_size}. Pass such a page size, "
                "or a table of slots and page_size 1."
            )
        if self.keys.stride(-1) != 1 or self.values.stride(-1) != 1:
            raise UnsupportedError(
                "keys and values must be contiguous in their last axis, got strides "
                f"{self.keys.stride()} and {self.values.stride()}. Pass contiguous tensors."
            )

    @property
    def format(self) -> KVFormat:
        """How elements are stored."""
        return kv_format(self.keys.dtype)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and of values."""
        return self.keys.shape[1]

    @property
    def k_dim(self) -> int:
        """Width of a key."""
        return self.keys.shape[2]

    @property
    def v_dim(self) -> int:
        """Width of a value."""
        return self.values.shape[2]
