"""From logits to tokens: penalties, bias, mask, then greedy choice or a draw, row by row independent of the batch.

It knows no model and no array library. In this order:

1. repetition, frequency and presence penalties, on the model's logits;
2. logit bias (``-inf`` forbids a token);
3. the grammar mask;
4. the largest logit where temperature is 0, else temperature, top-k, top-p, min-p and a draw (``candidates``).

A batch of greedy rows pays for none of what only draws need: no softmax, no noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cardan.ops import Ops
from cardan.runner.candidates import GREEDY_BELOW, FilteredDraw, FilterRows, draw_unfiltered, place, plain_inputs
from cardan.runner.penalties import PenaltyCounts
from cardan.types import Array, Int32Array, SamplingBatch

Mask = npt.NDArray[np.uint32]
ALL_ALLOWED = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of the sampled rows, on the device.

    Attributes:
        tokens: int32 ``[n]``; 0 for a failed row.
        failed: bool ``[n]``, the model's logits held NaN or no token was allowed.
    """

    tokens: Array
    failed: Array


def choose(ops: Ops, logits: Array, scores: Array, rows: int) -> tuple[Array, Array]:
    """The likeliest token of each row, int32 ``[n, 1]``, and which rows fail, bool ``[n, 1]``.

    A row fails where there is NaN among the model's logits, or its largest score is ``-inf``.
    """
    best, tokens = ops.topk(scores, 1)
    ones = ops.from_host(np.ones((rows, 1), dtype=np.float32))
    zeros = ops.from_host(np.zeros((rows, 1), dtype=np.float32))
    alive = ops.where(ops.compare(best, ">", -np.inf), ones, 0.0)
    broken = ops.reshape(ops.is_nan(logits), (-1, 1))
    return tokens, ops.compare(ops.where(broken, zeros, alive), "==", 0.0)


def settle(ops: Ops, tokens: Array, failed: Array, rows: int) -> Sampled:
    """The tokens ``[n, 1]`` that were chosen, but for rows that failed."""
    nothing = ops.from_host(np.zeros((rows, 1), dtype=np.int32))
    return Sampled(ops.reshape(ops.where(failed, nothing, tokens), (-1,)), ops.reshape(failed, (-1,)))


class Sampler:
    """Samples for the rows of one device; keeps the penalties' counts between steps."""

    def __init__(self, ops: Ops, vocab_size: int, *, may_wait: bool = True) -> None:
        """Bind a sampler.

        Args:
            ops: of the device.
            vocab_size: columns of the logits.
            may_wait: whether it may read from the device; where steps overlap it may not. Tokens do not depend on it.
        """
        self._ops = ops
        self._vocab_size = vocab_size
        self._penalties = PenaltyCounts(ops, vocab_size)
        self._adjuster = ops.logit_adjuster()
        self._drawer = ops.token_drawer()
        self._filtered = FilteredDraw(ops, vocab_size, may_wait=may_wait)

    def sample(self, logits: Array, sampling: SamplingBatch, mask: Mask | None = None) -> Sampled:
        """Choose a token for each row of ``logits: float32 [n, vocab]``; ``logits`` stay as they are."""
        self._penalties.seed(sampling.penalty_seeds)
        asking = self._penalties.asking(sampling)
        scores = self._adjust(logits, sampling, asking, mask)
        sampled = self._choose(logits, scores, sampling)
        if len(asking):
            self._penalties.count(sampling, asking, sampled.tokens)
        return sampled

    def _choose(self, logits: Array, scores: Array, sampling: SamplingBatch) -> Sampled:
        """By the device's kernel where it has one, else by operations."""
        if self._drawer is not None:
            return Sampled(*self._drawer(scores, sampling, logits))
        ops = self._ops
        likeliest, failed = choose(ops, logits, scores, len(sampling.row_ids))
        return settle(ops, self._draw(scores, likeliest, sampling), failed, len(sampling.row_ids))

    def _adjust(self, logits: Array, sampling: SamplingBatch, asking: Int32Array, mask: Mask | None) -> Array:
        """Logits after penalties, bias and mask; a copy where anything changes."""
        biased = len(sampling.bias_index) > 0
        words: Mask | None = None
        if mask is not None and sampling.has_mask.any():
            words = np.where(sampling.has_mask[:, None], mask, ALL_ALLOWED).astype(np.uint32)
        if not (len(asking) or biased or words is not None):
            return logits
        if self._adjuster is not None:
            penalized = self._penalties.penalized(sampling, asking) if len(asking) else None
            return self._adjuster(logits, sampling, penalized, words)
        return self._compose(logits, sampling, asking, words)

    def _compose(self, logits: Array, sampling: SamplingBatch, asking: Int32Array, words: Mask | None) -> Array:
        """The same by operations, where the device has no kernel for it."""
        ops = self._ops
        scores = ops.scale(logits, 1.0)
        if len(asking):
            scores = self._penalties.apply(scores, sampling, asking)
        if len(sampling.bias_index):
            scores = ops.scatter_add(
                scores,
                ops.from_host(sampling.bias_index),
                ops.from_host(sampling.bias_ids),
                ops.from_host(sampling.bias_values),
            )
        if words is not None:
            allowed = ops.unpack_bits(ops.from_host(words.view(np.int32)), self._vocab_size)
            scores = ops.where(allowed, scores, -np.inf)
        return scores

    def _draw(self, scores: Array, greedy: Array, sampling: SamplingBatch) -> Array:
        """Replace the greedy tokens ``[n, 1]`` of rows that draw."""
        drawing = sampling.temperature >= GREEDY_BELOW
        if not drawing.any():
            return greedy
        filters = (sampling.top_k < self._vocab_size) | (sampling.top_p < 1) | (sampling.min_p > 0)
        tokens = greedy
        plain, filtered = (np.flatnonzero(rows).astype(np.int32) for rows in (drawing & ~filters, drawing & filters))
        if len(plain):
            rows = FilterRows.of(sampling, plain)
            picked = draw_unfiltered(
                self._ops, self._take(scores, plain, sampling), place(self._ops, plain_inputs(rows)), self._vocab_size
            )
            tokens = self._ops.scatter_rows(tokens, self._ops.from_host(plain), picked)
        if len(filtered):
            picked = self._filtered.draw(self._take(scores, filtered, sampling), FilterRows.of(sampling, filtered))
            tokens = self._ops.scatter_rows(tokens, self._ops.from_host(filtered), picked)
        return tokens

    def _take(self, scores: Array, rows: Int32Array, sampling: SamplingBatch) -> Array:
        return (
            scores if len(rows) == len(sampling.row_ids) else self._ops.gather_rows(scores, self._ops.from_host(rows))
        )
