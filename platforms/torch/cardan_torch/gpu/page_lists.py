"""Each row's pages one after the other, as libraries want them: counted on the host, looked up on the device.

It knows no library. Nothing waits: the host knows lengths, the device knows which pages they are in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cardan.platform import AttentionMeta
from cardan.types import ForwardMode, Int32Array
from cardan_torch.gpu.accelerator import Accelerator
from cardan_torch.gpu.kv_pool import GpuKVPool


@dataclass(frozen=True, slots=True)
class PageLists:
    """A step's pages of one KV group, row after row.

    Attributes:
        starts: int32 ``[rows + 1]`` on the host, first page of each row.
        last: int32 ``[rows]`` on the host, tokens in each row's last page.
        indices: int32 on the device, pages.
    """

    starts: Int32Array
    last: Int32Array
    indices: torch.Tensor


def list_pages(
    accelerator: Accelerator, pool: GpuKVPool, group: int, rows: tuple[torch.Tensor, Int32Array], page_size: int
) -> PageLists:
    """The pages of a step's rows.

    Args:
        accelerator: where the pool is.
        pool: with its tables.
        group: KV group.
        rows: lines of the tables, int32 on the device, and lengths on the host.
        page_size: slots that count as a page; a divisor of the pool's own.
    """
    lines, lengths = rows
    counts = -(-lengths // page_size)
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    owners = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    places = (np.arange(int(starts[-1]), dtype=np.int64) - starts[owners]) * page_size
    moved = accelerator.upload(np.stack((owners, places)))
    slots = pool.tables[group][lines.to(torch.int64)[moved[0]], moved[1]]
    return PageLists(starts, (lengths - (counts - 1) * page_size).astype(np.int32), slots // page_size)


def padded_lengths(meta: AttentionMeta, rows: int) -> Int32Array:
    """Lengths of a decode step's rows and of those that fill up to ``rows``, which are padding of one token."""
    lengths = np.ones(rows, dtype=np.int32)
    lengths[: len(meta.seq_lens)] = meta.seq_lens
    return lengths


def no_rows(groups: int) -> AttentionMeta:
    """A decode step without rows, with which plans are made that are filled later."""
    nothing = np.zeros(0, dtype=np.int32)
    return AttentionMeta(
        mode=ForwardMode.DECODE,
        query_starts=np.zeros(1, dtype=np.int32),
        seq_lens=nothing,
        row_ids=nothing,
        positions=nothing,
        out_slots=np.zeros((groups, 0), dtype=np.int32),
    )
