"""Hidden states of tokens on their way to the host: each of them, or one sum for each stretch of tokens.

It knows no request and no model.
"""

from __future__ import annotations

import numpy as np

from cardan.ops import Ops
from cardan.runner.logprobs import FetchArrays
from cardan.types import Array, Float32Array, Float64Array, Int32Array, PooledSpans

BLOCK_ROWS = 4096
"""Hidden states that are copied at once."""


class HiddenFetch:
    """Hidden states of chosen tokens under way."""

    def __init__(self, ops: Ops, fetch: FetchArrays, hidden: Array, index: Int32Array) -> None:
        """Queue the copies; ``hidden`` may be overwritten by the next step.

        Args:
            ops: the device's operations.
            fetch: starts copies to the host.
            hidden: ``[tokens, hidden]``, after the final norm.
            index: int32 ``[n]``, which tokens.
        """
        self._blocks = [
            fetch((ops.cast(ops.gather_rows(hidden, ops.from_host(index[at : at + BLOCK_ROWS])), "float32"),))
            for at in range(0, len(index), BLOCK_ROWS)
        ]

    def wait(self) -> Float32Array:
        """float32 ``[n, hidden]``."""
        rows = np.concatenate([block.wait()[0] for block in self._blocks])
        return rows.astype(np.float32, copy=False)


class PooledFetch:
    """Sums of hidden states under way."""

    def __init__(self, ops: Ops, fetch: FetchArrays, hidden: Array, spans: PooledSpans) -> None:
        """Queue the copies.

        Args:
            ops: the device's operations.
            fetch: starts copies to the host.
            hidden: ``[tokens, hidden]``, after the final norm.
            spans: which tokens.
        """
        counts = spans.stops - spans.starts
        stretches = zip(spans.starts.tolist(), spans.stops.tolist(), strict=True)
        index = np.concatenate([np.arange(start, stop, dtype=np.int32) for start, stop in stretches])
        self._owners = np.repeat(np.arange(len(counts)), counts)
        self._num_spans = len(counts)
        self._states = HiddenFetch(ops, fetch, hidden, index)

    def wait(self) -> Float64Array:
        """One sum a stretch: float64 ``[m, hidden]``."""
        rows = self._states.wait()
        sums = np.zeros((self._num_spans, rows.shape[1]), dtype=np.float64)
        np.add.at(sums, self._owners, rows)
        return sums
