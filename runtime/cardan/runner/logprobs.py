"""Log-probabilities of sampled tokens and of prompt tokens.

They are ``log_softmax`` of the model's own logits: before temperature, penalties, bias and masks. So they say what the
model thought, whatever the request did to it, and a prompt token's is comparable with an output token's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cardan.ops import Ops
from cardan.platform import Fetch
from cardan.types import Array, Int32Array, TokenLogprobs

BLOCK_BYTES = 64 * 2**20
"""Bound on the float32 logits of one block of prompt positions."""

FetchArrays = Callable[[Sequence[Array]], Fetch]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted at each of some rows: how many alternatives, and which further ids."""

    top: Int32Array
    token_ids: tuple[tuple[int, ...], ...]

    def part(self, start: int, stop: int) -> Wanted:
        """The same for a range of rows."""
        return Wanted(self.top[start:stop], self.token_ids[start:stop])

    def ids_of(self, row: int) -> tuple[int, ...]:
        """Further ids of a row."""
        return self.token_ids[row] if row < len(self.token_ids) else ()


class LogprobFetch:
    """Logprobs of a block of rows on their way to the host."""

    def __init__(self, ops: Ops, fetch: FetchArrays, logits: Array, targets: Array, wanted: Wanted) -> None:
        """Queue what is needed.

        Args:
            ops: the device's operations.
            fetch: starts copies to the host.
            logits: float32 ``[rows, vocab]``.
            targets: int32 ``[rows, 1]``, the token of each row.
            wanted: alternatives and further ids.
        """
        self._wanted = wanted
        rows = len(wanted.top)
        self._most = int(wanted.top.max(initial=0))
        named = np.zeros((rows, max((len(ids) for ids in wanted.token_ids), default=0)), dtype=np.int32)
        for row, ids in enumerate(wanted.token_ids):
            named[row, : len(ids)] = ids
        arrays = [ops.logsumexp(logits), ops.take_columns(logits, targets)]
        if self._most:
            arrays += ops.topk(logits, self._most)
        if named.shape[1]:
            arrays.append(ops.take_columns(logits, ops.from_host(named)))
        self._has_named = named.shape[1] > 0
        self._fetch = fetch(arrays)

    def wait(self) -> list[TokenLogprobs]:
        """One entry per row."""
        arrays = list(self._fetch.wait())
        total = arrays.pop(0).astype(np.float64)[:, None]
        own = arrays.pop(0) - total
        named = arrays.pop() - total if self._has_named else None
        values, ids = (arrays[0] - total, arrays[1]) if self._most else (None, None)
        result = []
        for row, count in enumerate(self._wanted.top):
            top: tuple[tuple[int, float], ...] = ()
            if values is not None and ids is not None:
                top = tuple((int(ids[row, j]), float(values[row, j])) for j in range(int(count)))
            chosen: tuple[tuple[int, float], ...] = ()
            if named is not None:
                chosen = tuple((i, float(named[row, j])) for j, i in enumerate(self._wanted.ids_of(row)))
            result.append(TokenLogprobs(logprob=float(own[row, 0]), top=top, chosen=chosen))
        return result


def block_rows(vocab_size: int) -> int:
    """How many rows of float32 logits stay within ``BLOCK_BYTES``."""
    return max(1, BLOCK_BYTES // (4 * vocab_size))
