"""What a model said of the tokens of a sequence: the likeliest ones at each position and the sum of all others.

It knows no engine and no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cardan.errors import CardanError
from cardan.types import Float32Array, Float64Array, Int32Array, TokenLogprobs

LEAST_REST = 1e-12
"""What the mass of all other tokens is taken for where rounding leaves nothing of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """One sequence's positions.

    Attributes:
        logprobs: float32 ``[n]``, of the token that stands there.
        top_ids: int32 ``[n, k]``, likeliest first.
        top_logprobs: float32 ``[n, k]``.
        rest: float32 ``[n]``, log of the mass of all tokens beyond those ``k``.
    """

    logprobs: Float32Array
    top_ids: Int32Array
    top_logprobs: Float32Array
    rest: Float32Array

    @property
    def num_positions(self) -> int:
        """How many positions."""
        return int(self.logprobs.shape[0])

    def check(self, name: str) -> None:
        """See that every position has numbers; without, a comparison would find no difference.

        Args:
            name: of the prompt, for the message.

        Raises:
            CardanError: a logprob is NaN, or a position lacks something.
        """
        rows = {array.shape[:1] for array in (self.logprobs, self.top_ids, self.top_logprobs, self.rest)}
        if len(rows) > 1 or self.top_ids.shape != self.top_logprobs.shape or self.top_ids.ndim != 2:
            raise CardanError(
                f"Prompt {name!r}: logprobs, likeliest tokens and the rest have different numbers of positions."
            )
        # A token that is masked has a logprob of -inf; the one that stands there, and the likeliest, cannot.
        bad = ~np.isfinite(self.logprobs) | np.isnan(self.rest) | np.isnan(self.top_logprobs).any(axis=1)
        bad |= ~np.isfinite(self.top_logprobs[:, 0])
        if bad.any():
            raise CardanError(
                f"Prompt {name!r}: logprobs of {int(bad.sum())} of {self.num_positions} positions are no finite "
                f"numbers, the first at index {int(bad.argmax())}. What computed them overflows or is "
                "broken: try --dtype float32, and `cardan conform` for the platform."
            )

    def first(self, count: int) -> Scores:
        """The same of the first positions only."""
        return Scores(
            logprobs=self.logprobs[:count],
            top_ids=self.top_ids[:count],
            top_logprobs=self.top_logprobs[:count],
            rest=self.rest[:count],
        )

    def cut(self, k: int) -> Scores:
        """The same with only the ``k`` likeliest, the others counted among the rest."""
        if k >= self.top_ids.shape[1]:
            return self
        more = np.exp(self.top_logprobs[:, k:].astype(np.float64)).sum(axis=1)
        rest = np.log(np.exp(self.rest.astype(np.float64)) + more).astype(np.float32)
        return Scores(
            logprobs=self.logprobs, top_ids=self.top_ids[:, :k], top_logprobs=self.top_logprobs[:, :k], rest=rest
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Greedy:
    """What a model went on with by itself.

    Attributes:
        ids: int32 ``[n]``.
        logprobs: float32 ``[n]``.
        margins: float32 ``[n]``, by how much its logprob is above the second.
    """

    ids: Int32Array
    logprobs: Float32Array
    margins: Float32Array


def rest_of(top_logprobs: npt.NDArray[np.floating]) -> Float32Array:
    """Log of the mass beyond the given logprobs ``[n, k]``."""
    mass: Float64Array = np.exp(top_logprobs.astype(np.float64)).sum(axis=1)
    return np.log(np.maximum(1.0 - mass, LEAST_REST)).astype(np.float32)


def score_rows(entries: Sequence[TokenLogprobs | None], expected: int, name: str) -> Scores:
    """Scores from an engine's logprobs, one entry per position.

    Raises:
        CardanError: some are missing, or no numbers.
    """
    there = [entry for entry in entries if entry is not None and entry.top]
    if len(there) != expected:
        raise CardanError(f"Prompt {name!r}: logprobs of {len(there)} positions came, expected {expected}.")
    top = np.asarray([[value for _, value in entry.top] for entry in there], dtype=np.float64)
    found = Scores(
        logprobs=np.asarray([entry.logprob for entry in there], np.float32),
        top_ids=np.asarray([[token for token, _ in entry.top] for entry in there], np.int32),
        top_logprobs=top.astype(np.float32),
        rest=rest_of(top),
    )
    found.check(name)
    return found


def from_logits(logits: npt.NDArray[np.floating], targets: Sequence[int], top: int) -> Scores:
    """Scores from logits ``[n, vocab]`` of the positions before ``targets``, computed in float64."""
    wide = logits.astype(np.float64)
    high = wide.max(axis=1, keepdims=True)
    logprobs = wide - high - np.log(np.exp(wide - high).sum(axis=1, keepdims=True))
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :top]
    best = np.take_along_axis(logprobs, order, axis=1)
    others = logprobs.copy()
    np.put_along_axis(others, order, -np.inf, axis=1)
    rest = np.log(np.maximum(np.exp(others).sum(axis=1), LEAST_REST))
    own = logprobs[np.arange(len(targets)), np.asarray(targets)]
    return Scores(
        logprobs=own.astype(np.float32),
        top_ids=order.astype(np.int32),
        top_logprobs=best.astype(np.float32),
        rest=rest.astype(np.float32),
    )
