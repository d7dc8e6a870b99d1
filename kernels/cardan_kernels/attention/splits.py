"""Decides, on the host, into how many parts the keys of each decode row are split.

It knows no kernel and no device; the number of multiprocessors is given.
"""

from __future__ import annotations

from dataclasses import dataclass

FEWEST_TOKENS = 256
"""Keys that a part is worth its launch and its share of the reduction for."""
MOST_SPLITS = 128
WAVES = 2
"""Programs for each multiprocessor that hide one another's loads."""
FIXED_TOKENS = 512
"""Keys of a part in deterministic mode."""


@dataclass(frozen=True, slots=True)
class Splits:
    """How keys of a row are split, the same for all rows of a launch.

    Attributes:
        count: parts of each row; programs of parts beyond a short row's keys return at once.
        tokens: keys of a part, where that is fixed; None splits each row's keys evenly into ``count`` parts.
    """

    count: int
    tokens: int | None = None

    @property
    def reduced(self) -> bool:
        """Whether a second pass puts parts together: always where their size is fixed, so that all rows see it."""
        return self.count > 1 or self.tokens is not None


def choose_splits(rows: int, head_tiles: int, max_length: int, multiprocessors: int) -> Splits:
    """As many even parts as fill the chip and still are worth it.

    Args:
        rows: decode rows of the launch, padding included.
        head_tiles: programs that one part of one row takes: ``head_tiles`` of the layer's shape.
        max_length: no row is longer; under a graph what the bucket allows, not what the rows have now.
        multiprocessors: of the chip.
    """
    wanted = -(-WAVES * multiprocessors // max(rows * head_tiles, 1))
    return Splits(max(1, min(wanted, max_length // FEWEST_TOKENS, MOST_SPLITS)))


def fixed_splits(max_length: int, tokens: int = FIXED_TOKENS) -> Splits:
    """Parts of a fixed size: a row's result then depends on that row alone, and on no row beside it, bit for bit.

    Args:
        max_length: no row is longer; a larger one adds parts that are empty and changes no result.
        tokens: keys of a part.
    """
    return Splits(max(1, -(-max_length // tokens)), tokens)
