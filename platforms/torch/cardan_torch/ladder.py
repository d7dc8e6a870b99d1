"""For which row counts decode steps are captured, and what is said of steps that are larger.

It knows no graph and imports no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)

FIRST, STEP = 16, 8
"""From so many rows on there is a size every so many."""


def row_counts(small: Sequence[int], top: int, *, reaching: bool = False) -> tuple[int, ...]:
    """Row counts that decode steps are captured for, smallest first; none for ``top`` of 0.

    Args:
        small: those below ``FIRST``.
        top: most rows.
        reaching: whether the last count may be above ``top`` so that it holds a step of ``top`` rows.
    """
    counts = (*small, *range(FIRST, top + STEP, STEP))
    within = sum(rows <= top for rows in counts)
    if reaching and counts[:within][-1:] != (top,):
        within += 1
    return counts[:within]


class Ladder:
    """Sizes of captured steps.

    Attributes:
        counts: row counts, smallest first.
    """

    def __init__(self, counts: Sequence[int], option: str) -> None:
        """Make a ladder.

        Args:
            counts: row counts, smallest first.
            option: of the platform, which bounds them.
        """
        self.counts = tuple(counts)
        self._option = option
        self._said_eager = False

    def holds(self, rows: int) -> bool:
        """Whether a step of so many rows has a size; the log says once where one is too large."""
        if not rows or not self.counts:
            return False
        if rows <= self.counts[-1]:
            return True
        if not self._said_eager:
            self._said_eager = True
            logger.warning(
                "a decode step of %d rows runs eagerly: steps are captured up to %d rows. "
                "Raise --platform-option %s, or lower --max-running-requests.",
                rows,
                self.counts[-1],
                self._option,
            )
        return False

    def size_for(self, rows: int) -> int:
        """The smallest size that holds a step of so many rows."""
        return next(count for count in self.counts if count >= rows)
