"""Cuts the queries of a batch into tiles, on the host: what each program of the prefill kernel works on.

It knows no kernel and no device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cardan.types import Int32Array

TILE_FIELDS = 4
"""Of a tile: its first token in the batch, how many there are, the position of the first, and the row's table line."""


def plan_tiles(query_starts: Int32Array, seq_lens: Int32Array, row_ids: Int32Array, tokens: int) -> Int32Array:
    """The tiles of a step, those with most keys first, so that no long one starts last.

    Args:
        query_starts: int32 ``[rows + 1]``, where each row's tokens begin in the batch.
        seq_lens: int32 ``[rows]``, after the step.
        row_ids: int32 ``[rows]``, each row's line of the table.
        tokens: queries that a tile holds: ``tokens_per_tile``.

    Returns:
        int32 ``[tiles, 4]``: see ``TILE_FIELDS``. Layers share it where ``tokens`` is the same.
    """
    counts = np.diff(query_starts).astype(np.int64)
    tiles = -(-counts // tokens)
    row = np.repeat(np.arange(len(counts)), tiles)
    first = (np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens
    plan: np.ndarray[Any, Any] = np.stack(
        (
            query_starts[:-1][row] + first,
            np.minimum(tokens, counts[row] - first),
            seq_lens[row] - counts[row] + first,
            row_ids[row],
        ),
        axis=1,
    )
    order = np.argsort(-(plan[:, 1] + plan[:, 2]), kind="stable")
    return plan[order].astype(np.int32)
