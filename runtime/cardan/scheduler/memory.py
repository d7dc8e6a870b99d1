"""The KV of running rows: takes slots, keeps the table, offers prefixes to the cache, gives everything back.

It does not decide who runs; it makes sure that nothing a step in flight still writes is given away.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from cardan.cache import (
    NO_SLOTS,
    Match,
    NodeHandle,
    NoPrefixCache,
    PrefixCache,
    RadixTree,
    RowTable,
    SlotAllocator,
)
from cardan.scheduler.lanes import Lanes
from cardan.scheduler.request import Request
from cardan.scheduler.row_arrays import RowArrays
from cardan.scheduler.running import RowIndex
from cardan.scheduler.settings import SchedulerSettings
from cardan.types import Int32Array, TableDeltas


@dataclass(slots=True)
class Held:
    """What is given back once a step was read: slots, locks and rows."""

    slots: list[Int32Array] = field(default_factory=list)
    nodes: list[NodeHandle] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Write:
    rows: Int32Array
    positions: Int32Array
    slots: Int32Array


class RowMemory:
    """Slots, rows and cached prefixes of one KV pool.

    Attributes:
        cache: the prefix cache.
        slots: the slot allocator.
        table: the row-to-slot table.
        arrays: lengths per row.
        evicted_tokens: cached tokens dropped so far.
    """

    def __init__(self, settings: SchedulerSettings, cache: PrefixCache | None = None) -> None:
        self.page_size = settings.page_size
        self._num_groups = settings.num_groups
        self.cache = cache or new_cache(settings)
        self.slots = SlotAllocator(settings.num_slots, settings.page_size)
        self.table = RowTable(settings.num_rows, settings.context_length)
        self.arrays = RowArrays(settings.num_rows, settings.vocab_size)
        self.evicted_tokens = 0
        self._steps: deque[Held] = deque()
        self._writes: list[_Write] = []

    # --- room ---

    @property
    def available_tokens(self) -> int:
        """Tokens that are free or could be made free by eviction."""
        return self.slots.num_free_tokens + self.cache.evictable_tokens

    @property
    def num_held_pages(self) -> int:
        """Pages that come free when the steps in flight are read."""
        return sum(-(-run.shape[0] // self.page_size) for held in self._steps for run in held.slots)

    def make_room(self, num_pages: int) -> bool:
        """Evict until so many pages are free. Returns whether they are."""
        missing = num_pages - self.slots.num_free_pages
        if missing > 0:
            freed = self.cache.evict(missing * self.page_size)
            self.slots.free(freed)
            self.evicted_tokens += int(freed.shape[0])
            missing = num_pages - self.slots.num_free_pages
        return missing <= 0

    # --- rows ---

    def admit(self, request: Request, match: Match) -> None:
        """Give a request a row that starts from a matched prefix, which is locked already."""
        row = self.table.take()
        request.row, request.node = row, match.node
        self.arrays.assign(row, request)
        length = match.length
        self.arrays.seq_len[row] = self.arrays.safe_len[row] = self.arrays.prefix_len[row] = length
        self._write(row, 0, match.slots)

    def extend(self, row: int, num_tokens: int) -> Int32Array:
        """Take slots for tokens at the end of a row whose length is a whole number of pages.

        Returns:
            int32 ``[num_tokens]``.
        """
        start = int(self.arrays.seq_len[row])
        slots = self.slots.allocate_run(num_tokens)
        self._write(row, start, slots)
        self.arrays.seq_len[row] = start + num_tokens
        return slots

    def pages_to_decode(self, rows: RowIndex) -> int:
        """New pages that the next step of ``rows`` needs."""
        if self.arrays.forced:
            lengths = self.arrays.seq_len[rows]
            return int((self._pages(lengths + self.arrays.tokens_to_compute(rows)) - self._pages(lengths)).sum())
        if self.page_size == 1:
            return int(rows.shape[0])
        return int(np.count_nonzero(self.arrays.seq_len[rows] % self.page_size == 0))

    def extend_decode(self, rows: RowIndex, row_ids: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Take a slot for one more token of each row, given twice, to index with and as ids; there is room.

        Returns:
            Positions and slots of the tokens, int32 ``[rows]`` each.
        """
        positions = self.arrays.seq_len[rows]
        slots = self._extend_cells(rows * self.table.max_length + positions, positions)
        self.arrays.seq_len[rows] = positions + 1
        self.arrays.version += 1
        self._writes.append(_Write(row_ids, positions, slots))
        return positions, slots

    def extend_lanes(self, lanes: Lanes, row_ids: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Take a slot for one more token of every running row; there is room, and all may decode.

        Returns:
            Positions and slots of the tokens, and the rows' lengths with them, int32 ``[rows]`` each.
        """
        positions = lanes.positions
        slots = self._extend_cells(lanes.cells, positions)
        self._writes.append(_Write(row_ids, positions, slots))
        return positions, slots, lanes.advance()

    def extend_rows(self, rows: RowIndex, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Take slots for several more tokens of each row, wherever in a page it ends; there is room.

        Returns:
            Positions and slots of the tokens, int32 ``[sum of counts]`` each, row by row.
        """
        positions, slots = [], []
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            start = int(self.arrays.seq_len[row])
            in_page = min(-start % self.page_size, count)
            run = np.arange(in_page, dtype=np.int32)
            if in_page:
                run += self.table.slots[row, start - 1] + np.int32(1)
            if count > in_page:
                run = np.concatenate((run, self.slots.allocate_run(count - in_page)))
            self._write(row, start, run)
            self.arrays.seq_len[row] = start + count
            self.arrays.forced.pop(row, None)
            self.arrays.version += 1
            positions.append(np.arange(start, start + count, dtype=np.int32))
            slots.append(run)
        return np.concatenate(positions), np.concatenate(slots)

    def share(self, row: int) -> None:
        """Offer a row's whole pages to the cache and lock them; duplicates become free once the step was read.

        Steps in flight may still compute this KV: whoever matches it runs after them.
        """
        request = self.arrays.requests[row]
        assert request is not None
        length = int(self.arrays.seq_len[row])
        start = int(self.arrays.prefix_len[row])
        kept, node, existing = self._offer(request, row, length)
        if existing.shape[0] > start:
            self._hold(slots=self.table.slots[row, start : existing.shape[0]].copy())
            self._write(row, start, existing[start:])
        if kept:
            self.cache.lock(node)
            self.cache.unlock(request.node)
            request.node = node
            self.arrays.prefix_len[row] = kept

    def release(self, request: Request, keep: bool) -> None:
        """Take a request's row away; with ``keep`` its computed KV stays in the cache.

        What steps in flight may write, and the row itself, come free when they were read.
        """
        row, arrays = request.row, self.arrays
        length, start = int(arrays.seq_len[row]), int(arrays.prefix_len[row])
        safe = min(int(arrays.safe_len[row]), length)
        if keep and safe > start:
            kept, _, existing = self._offer(request, row, safe)
            self.slots.free(self.table.slots[row, start : max(existing.shape[0], start)])
            start = max(kept, start)
        tail = self.table.slots[row, start:length].copy()
        if int(arrays.prefix_len[row]) <= safe:
            self.cache.unlock(request.node)
            self._hold(slots=tail, row=row)
        else:
            self._hold(slots=tail, row=row, node=request.node)
        arrays.release(row)
        request.row, request.node = 0, None

    def distrust(self, request: Request) -> None:
        """Drop from the cache what a request without a row has computed, now or before it was retracted."""
        if request.embeds is not None:
            return
        self._hold(slots=self.cache.discard(request.sequence(), request.cache_salt, request.computed_from))

    # --- steps ---

    def begin_step(self) -> TableDeltas:
        """A step is launched: everything given back from now on waits until it was read.

        Returns:
            All changes to the table since the step before.
        """
        self._steps.append(Held())
        writes, self._writes = self._writes, []
        if len(writes) == 1:
            rows, positions, slots = writes[0].rows, writes[0].positions, writes[0].slots
        else:
            empty = np.empty(0, dtype=np.int32)
            rows = np.concatenate([empty, *(write.rows for write in writes)])
            positions = np.concatenate([empty, *(write.positions for write in writes)])
            slots = np.concatenate([empty, *(write.slots for write in writes)])
        return TableDeltas(rows=rows, positions=positions, slots=self.by_group(slots))

    def by_group(self, slots: Int32Array) -> Int32Array:
        """Slots ``[n]`` as ``[groups, n]``: all groups keep a token in the same slot of their own pools."""
        if self._num_groups == 1:
            return slots[None, :]
        return np.broadcast_to(slots, (self._num_groups, slots.shape[0]))

    def end_step(self) -> bool:
        """The oldest step in flight was read. Returns whether something came free."""
        held = self._steps.popleft()
        for slots in held.slots:
            self.slots.free(slots)
        for node in held.nodes:
            self.cache.unlock(node)
        for row in held.rows:
            self._free_row(row)
        return bool(held.slots or held.nodes or held.rows)

    # --- checks ---

    def check_slots(self) -> None:
        """Check that every page is free, cached, held until a step is read, or owned by exactly one row."""
        size = self.page_size
        owned = [self.slots.free_pages(), self.cache.held_slots()[::size] // size]
        owned.extend(run[::size] // size for held in self._steps for run in held.slots)
        for row in np.flatnonzero(self.arrays.alive):
            run = self.table.slots[row, self.arrays.prefix_len[row] : self.arrays.seq_len[row]]
            owned.append(run[::size] // size)
        counts = np.bincount(np.concatenate(owned), minlength=self.slots.num_pages + 1)
        assert counts[0] == 0, "the padding page was used"
        assert (counts[1:] == 1).all(), f"pages lost or held twice: {np.flatnonzero(counts[1:] != 1) + 1}"

    # --- inside ---

    def _extend_cells(self, cells: RowIndex, positions: Int32Array) -> Int32Array:
        """Take a slot for a token in each cell of the table, which is at a position of its row."""
        table = self.table.flat
        if self.page_size == 1:
            slots = self.slots.allocate_pages(cells.shape[0])
        else:
            fresh = positions % self.page_size == 0
            slots = table[cells - 1] + np.int32(1)
            slots[fresh] = self.slots.allocate_pages(int(np.count_nonzero(fresh))) * np.int32(self.page_size)
        table[cells] = slots
        return slots

    def _pages(self, lengths: Int32Array) -> Int32Array:
        return -(-lengths // self.page_size)

    def _offer(self, request: Request, row: int, length: int) -> tuple[int, NodeHandle, Int32Array]:
        """Insert the first ``length`` tokens; returns tokens kept, their end, and slots that were there before."""
        if request.embeds is not None:
            return 0, None, NO_SLOTS  # its token ids stand for nothing that another request could have
        slots = self.table.slots[row, :length]
        inserted = self.cache.insert(request.sequence()[:length], slots, request.cache_salt, request.priority)
        return inserted.kept, inserted.node, inserted.existing

    def _write(self, row: int, start: int, slots: Int32Array) -> None:
        stop = start + slots.shape[0]
        if stop == start:
            return
        self.table.slots[row, start:stop] = slots
        positions = np.arange(start, stop, dtype=np.int32)
        self._writes.append(_Write(np.full(stop - start, row, dtype=np.int32), positions, slots))

    def _hold(self, slots: Int32Array, row: int = 0, node: NodeHandle = None) -> None:
        """Give back now, or when the newest step in flight was read."""
        if not self._steps:
            self.slots.free(slots)
            self.cache.unlock(node)
            if row:
                self._free_row(row)
            return
        held = self._steps[-1]
        if slots.shape[0]:
            held.slots.append(slots)
        if node is not None:
            held.nodes.append(node)
        if row:
            held.rows.append(row)

    def _free_row(self, row: int) -> None:
        """Make a row free; changes to it that no step has carried yet must not meet those of its next owner."""
        self.arrays.requests[row] = None
        self._writes = [write for write in self._writes if write.rows[0] != row or (write.rows != row).any()]
        self.table.give_back(row)


def new_cache(settings: SchedulerSettings) -> PrefixCache:
    """The prefix cache that the settings ask for."""
    if settings.disable_radix_cache:
        return NoPrefixCache()
    return RadixTree(settings.page_size, settings.radix_eviction_policy)
