"""The row-to-slot table on the host, and which of its rows are in use.

It does not know requests: a row is a number.
"""

from __future__ import annotations

import numpy as np

from cardan.types import Int32Array


class RowTable:
    """Where the KV of each running sequence is. Row 0 is padding and is never handed out.

    Attributes:
        slots: int32 ``[num_rows, max_length]``, slot of each position of each row.
        flat: the same memory, int32 ``[num_rows * max_length]``.
    """

    __slots__ = ("_free", "flat", "slots")

    def __init__(self, num_rows: int, max_length: int) -> None:
        """Make a table whose rows ``1 .. num_rows - 1`` are free."""
        self.slots: Int32Array = np.zeros((num_rows, max_length), dtype=np.int32)
        self.flat: Int32Array = self.slots.reshape(-1)
        self._free = list(range(num_rows - 1, 0, -1))

    @property
    def max_length(self) -> int:
        """Cells of a row."""
        return int(self.slots.shape[1])

    @property
    def num_rows(self) -> int:
        """Rows of the table, the padding row included."""
        return int(self.slots.shape[0])

    @property
    def num_free(self) -> int:
        """Rows that can be taken now."""
        return len(self._free)

    def take(self) -> int:
        """Take a free row; the caller has made sure that there is one."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """Make a row free again."""
        assert 0 < row < self.num_rows, f"row {row} was never handed out"
        self._free.append(row)

    def free_rows(self) -> tuple[int, ...]:
        """Ids of all free rows, for checks."""
        return tuple(self._free)
