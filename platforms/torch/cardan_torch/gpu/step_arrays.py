"""A step's integers on the device: all in one buffer that one copy fills, so that a graph finds them where they were.

It knows no attention; it knows which numbers a step has.
"""

from __future__ import annotations

import numpy as np
import torch

from cardan.platform import AttentionMeta
from cardan.types import Int32Array
from cardan_torch.gpu.accelerator import Accelerator

ALIGNED = 4
"""Fields begin at multiples of 16 bytes, as kernels that are compiled for aligned pointers want it."""


class StepArrays:
    """Integers of a step of so many rows and tokens.

    Attributes:
        row_ids: int32 ``[rows]``, row of the tables.
        seq_lens: int32 ``[rows]``, after the step.
        query_starts: int32 ``[rows + 1]``, first token of each row.
        positions: int32 ``[tokens]``.
        out_slots: int32 ``[groups, tokens]``, where keys and values are written.
        num_rows: rows, those that only fill up among them.
    """

    def __init__(self, accelerator: Accelerator, rows: int, tokens: int, groups: int) -> None:
        """Reserve the buffer; ``fill`` brings values."""
        self._accelerator = accelerator
        self._shapes = ((rows,), (rows,), (rows + 1,), (tokens,), (groups, tokens))
        starts = np.cumsum([0, *(_aligned(int(np.prod(shape))) for shape in self._shapes)])
        self._starts = [int(start) for start in starts]
        self._buffer = torch.zeros(self._starts[-1], dtype=torch.int32, device=accelerator.device)
        self.num_rows = rows
        self.row_ids, self.seq_lens, self.query_starts, self.positions, self.out_slots = (
            self._buffer[start : start + int(np.prod(shape))].view(shape)
            for start, shape in zip(self._starts, self._shapes, strict=False)
        )

    @classmethod
    def of(cls, accelerator: Accelerator, meta: AttentionMeta) -> StepArrays:
        """A step's own, as large as it is."""
        made = cls(accelerator, len(meta.row_ids), len(meta.positions), len(meta.out_slots))
        made.fill(meta)
        return made

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self._buffer.nbytes

    def fill(self, meta: AttentionMeta) -> None:
        """Bring a step's integers by one copy; rows that fill up are padding: one token of row 0 in slot 0.

        Raises:
            ValueError: the step has more rows, or fills up rows of several tokens.
        """
        count, rows = len(meta.row_ids), self.num_rows
        tokens = self.positions.shape[0]
        missing = rows - count
        if missing < 0 or (len(meta.positions) != tokens if missing == 0 else len(meta.positions) + missing != tokens):
            raise ValueError(
                f"Step arrays of {rows} rows and {tokens} tokens cannot hold {count} rows of {len(meta.positions)} "
                "tokens. Make arrays of that size."
            )
        packed = np.zeros(self._starts[-1], dtype=np.int32)
        row_ids, seq_lens, query_starts, positions, out_slots = self._fields(packed)
        row_ids[:count] = meta.row_ids
        seq_lens[:count] = meta.seq_lens
        seq_lens[count:] = 1
        query_starts[: count + 1] = meta.query_starts
        query_starts[count + 1 :] = meta.query_starts[-1] + np.arange(1, missing + 1)
        positions[: len(meta.positions)] = meta.positions
        out_slots[:, : len(meta.positions)] = meta.out_slots
        self._accelerator.upload(packed, out=self._buffer)

    def _fields(self, packed: Int32Array) -> list[Int32Array]:
        return [
            packed[start : start + int(np.prod(shape))].reshape(shape)
            for start, shape in zip(self._starts, self._shapes, strict=False)
        ]


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED
