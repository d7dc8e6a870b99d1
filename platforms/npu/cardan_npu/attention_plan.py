"""One step's attention on an NPU: block tables, lengths and masks, made on the host once for each kind of layers.

It knows no layer's arrays; layers that share a group and a window share what is made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cardan.platform import AttentionMeta
from cardan.types import ForwardMode, Int32Array
from cardan_npu.kv_pool import NpuKVPool
from cardan_npu.limits import MOST_ROWS
from cardan_torch.attention_plan import StepPlan, plan_step

Kind = tuple[int, int | None]
"""Group and window of layers."""


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows as the fused operator takes them, on the host.

    Attributes:
        blocks: int32 ``[rows, width]``, page numbers; 0, the padding page, behind a row's last.
        lengths: keys of each row from its first named page on.
        hidden: bool ``[rows, width * page]``, keys that one query a row must not see; None where it sees all.
    """

    blocks: Int32Array
    lengths: list[int]
    hidden: np.ndarray[tuple[int, int], np.dtype[np.bool_]] | None


@dataclass(frozen=True, slots=True)
class Rows:
    """The same on the device.

    Attributes:
        blocks: int32 ``[rows, width]``.
        lengths: on the host, where the operator wants them.
        mask: bool ``[rows, 1, 1, width * page]``, true hides; None where nothing is hidden.
        parts: rows of one call after the other, see ``rows_by_call``.
    """

    blocks: torch.Tensor
    lengths: list[int]
    mask: torch.Tensor | None
    parts: tuple[slice, ...]

    def of_part(self, part: slice) -> Rows:
        """The rows of one call."""
        mask = None if self.mask is None else self.mask[part]
        return Rows(self.blocks[part], self.lengths[part], mask, (part,))


def rows_by_call(lengths: Sequence[int], page: int, most: int) -> tuple[slice, ...]:
    """Rows that one call may have: 4,096, and no more pages together than the cache has, though rows may share some.

    Args:
        lengths: keys of each row.
        page: tokens of a page.
        most: pages of the cache, at least those of any row.
    """
    parts, first, held = [], 0, 0
    for row, length in enumerate(lengths):
        count = -(-length // page)
        if row - first == MOST_ROWS or (held + count > most and row > first):
            parts.append(slice(first, row))
            first, held = row, 0
        held += count
    return (*parts, slice(first, len(lengths)))


def full_rows(pool: NpuKVPool, meta: AttentionMeta, group: int) -> HostRows:
    """All keys of every row."""
    page = pool.page_size
    counts = -(-meta.seq_lens.astype(np.int64) // page)
    width = int(counts.max())
    firsts = pool.host_tables[group][meta.row_ids, : width * page : page]
    blocks = np.where(np.arange(width) < counts[:, None], firsts // page, 0).astype(np.int32)
    return HostRows(blocks, [int(length) for length in meta.seq_lens], None)


def window_rows(pool: NpuKVPool, meta: AttentionMeta, group: int, window: int) -> HostRows:
    """Only the pages that a window touches, for rows of one query each, which see the last ``window`` keys."""
    page = pool.page_size
    lengths = meta.seq_lens.astype(np.int64)
    oldest = np.maximum(lengths - window, 0)
    first_page = oldest // page
    counts = (lengths - 1) // page - first_page + 1
    width = int(counts.max())
    columns = np.arange(width)
    places = np.minimum((first_page[:, None] + columns) * page, pool.host_tables.shape[2] - 1)
    slots = pool.host_tables[group][meta.row_ids[:, None], places]
    blocks = np.where(columns < counts[:, None], slots // page, 0).astype(np.int32)
    hidden = np.arange(width * page) < (oldest - first_page * page)[:, None]
    return HostRows(blocks, [int(length) for length in lengths - first_page * page], hidden)


def window_width(window: int, page: int) -> int:
    """Most pages that a window touches."""
    return -(-(window - 1) // page) + 1


@dataclass(slots=True)
class EagerPlan:
    """A step's plan, filled in as layers of new kinds ask.

    Attributes:
        meta: the step.
        single: every row has one query, so that windows are masks.
        query_ends: behind the last token of each row, on the host.
        out_slots: int32 ``[groups, tokens, 1]`` on the device.
    """

    meta: AttentionMeta
    pool: NpuKVPool
    single: bool
    query_ends: list[int]
    out_slots: torch.Tensor
    kinds: dict[Kind, Rows] = field(default_factory=dict)
    torch_step: StepPlan | None = None

    @classmethod
    def of(cls, pool: NpuKVPool, meta: AttentionMeta) -> EagerPlan:
        """The plan of a step."""
        out_slots = torch.from_numpy(np.ascontiguousarray(meta.out_slots)).to(pool.tables.device)
        ends = [int(end) for end in meta.query_starts[1:]]
        return cls(meta, pool, meta.mode is ForwardMode.DECODE, ends, out_slots[:, :, None])

    def rows(self, kind: Kind) -> Rows:
        """What the fused operator takes for layers of a kind."""
        found = self.kinds.get(kind)
        if found is None:
            group, window = kind
            if self.single and window is not None:
                host = window_rows(self.pool, self.meta, group, window)
            else:
                host = full_rows(self.pool, self.meta, group)
            found = self.kinds[kind] = _on_device(host, self.pool)
        return found

    def torch_plan(self) -> StepPlan:
        """The plan of layers that the fused operator does not take."""
        if self.torch_step is None:
            self.torch_step = plan_step(self.meta, self.pool.tables)
        return self.torch_step


def _on_device(host: HostRows, pool: NpuKVPool) -> Rows:
    device, mask = pool.tables.device, None
    if host.hidden is not None and host.hidden.any():
        mask = torch.from_numpy(host.hidden[:, None, None]).to(device)
    # a dry run's only page stands for as many as its rows have, so that the step is measured in the calls of serving
    most = pool.num_pages if pool.num_pages > 1 else sum(host.lengths)
    parts = rows_by_call(host.lengths, pool.page_size, most)
    return Rows(torch.from_numpy(host.blocks).to(device), host.lengths, mask, parts)
