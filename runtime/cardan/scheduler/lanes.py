"""The running rows side by side, gathered once, so that a decode step of all of them looks nothing up.

It decides nothing; it notices when anything but such a step has changed a row, and gathers anew.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cardan.scheduler.row_arrays import RowArrays
from cardan.scheduler.running import ONE, RowIndex, RunningSet
from cardan.types import Int32Array


class Lanes:
    """All running rows, as far as decode steps move them: each step takes every row on by one token.

    Attributes:
        positions: int32 ``[n]``, where the next token of each row goes; not to be changed.
        cells: intp ``[n]``, the same as indices into the flat row-to-slot table; not to be changed.

    Both are right once ``all_decode`` was asked, until something else moves a row.
    """

    __slots__ = ("_arrays", "_row_length", "_running", "_stamp", "_steps_left", "cells", "positions")

    def __init__(self, running: RunningSet, arrays: RowArrays, row_length: int) -> None:
        """Make lanes that gather when they are first asked.

        Args:
            running: the rows.
            arrays: what is known of them.
            row_length: cells of one row of the row-to-slot table.
        """
        self._running = running
        self._arrays = arrays
        self._row_length = row_length
        self._stamp = (-1, -1)
        self._steps_left = 0
        self.positions: Int32Array = np.empty(0, dtype=np.int32)
        self.cells: npt.NDArray[np.intp] = np.empty(0, dtype=np.intp)

    @property
    def all_decode(self) -> bool:
        """Whether every running row may take one more token: none has all it may have, none waits."""
        if self._stamp != (self._running.version, self._arrays.version):
            self._gather()
        return self._steps_left > 0

    def advance(self) -> Int32Array:
        """Every row takes a token at its position. Returns the lengths after it, int32 ``[n]``."""
        self.positions = self.positions + ONE
        self.cells = self.cells + ONE
        self._steps_left -= 1
        self._arrays.seq_len[self._running.rows] = self.positions
        return self.positions

    def check(self) -> None:
        """Check that what was gathered is still so.

        Raises:
            AssertionError: something moved a row without a sign.
        """
        if self._stamp != (self._running.version, self._arrays.version):
            return
        rows, arrays = self._running.rows, self._arrays
        assert (self.positions == arrays.seq_len[rows]).all(), "a row of the lanes has another length"
        assert (self.cells == rows * self._row_length + self.positions).all(), "a lane points to another cell"
        left = arrays.max_new[rows] - arrays.generated[rows] - arrays.pending[rows]
        decodable = ((left > 0) & ~arrays.held[rows]).all()
        assert self._steps_left <= 0 or decodable, "a row of the lanes has no token left, or waits"

    def _gather(self) -> None:
        rows: RowIndex = self._running.rows
        arrays = self._arrays
        self._stamp = (self._running.version, arrays.version)
        self.positions = arrays.seq_len[rows]
        self.cells = rows * self._row_length + self.positions
        left = arrays.max_new[rows] - arrays.generated[rows] - arrays.pending[rows]
        waits = bool(arrays.held[rows].any())
        self._steps_left = 0 if waits else int(left.min(initial=np.iinfo(np.int32).max))
