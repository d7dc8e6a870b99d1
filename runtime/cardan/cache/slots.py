"""Hands out the slots of the KV pool, whole pages at a time.

It does not know who holds a slot, nor what is in it.
"""

from __future__ import annotations

import numpy as np

from cardan.errors import ConfigError
from cardan.types import Int32Array


class SlotAllocator:
    """A stack of free pages. Page 0 is padding and is never handed out.

    Slot ``s`` lies in page ``s // page_size``; pages ``1 .. num_pages`` can be used.
    """

    __slots__ = ("_count", "_free", "_offsets", "num_pages", "page_size")

    def __init__(self, num_slots: int, page_size: int) -> None:
        """Make an allocator in which every page is free.

        Args:
            num_slots: tokens that the pool holds, without the padding page; a multiple of ``page_size``.
            page_size: tokens per page.

        Raises:
            ConfigError: the sizes do not fit each other.
        """
        if page_size < 1 or num_slots < page_size or num_slots % page_size:
            raise ConfigError(
                f"The KV pool must hold a whole number of pages, at least one, got {num_slots} tokens in pages of "
                f"{page_size}. Change --max-total-tokens or --page-size."
            )
        self.page_size = page_size
        self.num_pages = num_slots // page_size
        self._free = np.arange(self.num_pages, 0, -1, dtype=np.int32)
        self._count = self.num_pages
        self._offsets = np.arange(page_size, dtype=np.int32)

    @property
    def num_free_pages(self) -> int:
        """Pages that can be handed out now."""
        return self._count

    @property
    def num_free_tokens(self) -> int:
        """Tokens that the free pages hold."""
        return self._count * self.page_size

    def allocate_pages(self, num_pages: int) -> Int32Array:
        """Take pages; the caller has made sure that there are enough.

        Returns:
            Page ids, int32 ``[num_pages]``.
        """
        assert num_pages <= self._count, f"{num_pages} pages wanted, {self._count} free: admission let too much in"
        self._count -= num_pages
        return self._free[self._count : self._count + num_pages].copy()

    def allocate_run(self, num_tokens: int) -> Int32Array:
        """Take whole pages for tokens that begin at a page's start.

        Returns:
            Slots, int32 ``[num_tokens]``; the rest of the last page belongs to the caller as well.
        """
        pages = self.allocate_pages(-(-num_tokens // self.page_size))
        if self.page_size == 1:
            return pages
        slots = pages[:, None] * np.int32(self.page_size) + self._offsets
        return slots.reshape(-1)[:num_tokens]

    def free(self, slots: Int32Array) -> None:
        """Give pages back.

        Args:
            slots: slots of tokens in the order of their positions, beginning at a page's start; only the last
                page may be named in part, and is given back whole.
        """
        pages = slots[:: self.page_size] // self.page_size if self.page_size > 1 else slots
        end = self._count + pages.shape[0]
        assert end <= self.num_pages, f"{end} pages free of {self.num_pages}: a page was given back twice"
        self._free[self._count : end] = pages
        self._count = end

    def free_pages(self) -> Int32Array:
        """A copy of the ids of all free pages, for checks."""
        return self._free[: self._count].copy()
