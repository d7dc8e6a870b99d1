"""The set of rows that decode, in the order they joined, with arrays that are made anew only when it changes.

It knows nothing of a row but its number and its request.
"""

from __future__ import annotations

from collections.abc import ValuesView
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cardan.scheduler.request import Request
from cardan.types import Int32Array

RowIndex: TypeAlias = npt.NDArray[np.intp]
"""Row ids in the type that numpy indexes with; other integers are converted anew by every look-up."""


ONE: Int32Array = np.array(1, dtype=np.int32)
"""To be added to arrays: an array of no axis, since numpy takes thrice as long to convert a number each time."""


class RunningSet:
    """Rows that have all their prompt in the pool.

    Attributes:
        version: grows with each change.
    """

    __slots__ = ("_by_row", "_list", "_rids", "_row_ids", "_rows", "_stale", "version")

    def __init__(self) -> None:
        self._by_row: dict[int, Request] = {}
        self._rows: RowIndex = np.empty(0, dtype=np.intp)
        self._row_ids: Int32Array = np.empty(0, dtype=np.int32)
        self._list: list[Request] = []
        self._rids: list[str] = []
        self._stale = False
        self.version = 0

    def __len__(self) -> int:
        return len(self._by_row)

    def __contains__(self, row: int) -> bool:
        return row in self._by_row

    def add(self, request: Request) -> None:
        """Add a request's row."""
        self._by_row[request.row] = request
        self._changed()

    def discard(self, row: int) -> None:
        """Remove a row if it is there."""
        if self._by_row.pop(row, None) is not None:
            self._changed()

    def values(self) -> ValuesView[Request]:
        """The requests."""
        return self._by_row.values()

    @property
    def rows(self) -> RowIndex:
        """Rows ``[n]``, to index with; not to be changed."""
        self._refresh()
        return self._rows

    @property
    def row_ids(self) -> Int32Array:
        """The same rows, int32 ``[n]``, as batches have them; not to be changed."""
        self._refresh()
        return self._row_ids

    @property
    def requests(self) -> list[Request]:
        """Requests in the order of ``rows``; not to be changed."""
        self._refresh()
        return self._list

    @property
    def rids(self) -> list[str]:
        """Their ids in the same order; not to be changed."""
        self._refresh()
        return self._rids

    def _changed(self) -> None:
        self._stale = True
        self.version += 1

    def _refresh(self) -> None:
        if self._stale:
            self._rows = np.fromiter(self._by_row, dtype=np.intp, count=len(self._by_row))
            self._row_ids = self._rows.astype(np.int32)
            self._list = list(self._by_row.values())
            self._rids = [request.rid for request in self._list]
            self._stale = False
