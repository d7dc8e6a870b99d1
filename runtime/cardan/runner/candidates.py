"""Draws a token from logits under temperature, top-k, top-p and min-p by adding Gumbel noise to what they keep.

It knows no rows of a device and no penalties: logits in, token ids out. Noise is keyed by (seed, position, token id),
so a token depends on the row's logits, seed and position only, never on the batch around it.

The filters, in this order:

1. temperature divides the logits;
2. top-k keeps the k largest, equal ones by lower id;
3. top-p keeps the smallest set, most likely first, whose share of what top-k left reaches p;
4. min-p drops tokens less likely than ``min_p`` times the most likely one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cardan.ops import Ops
from cardan.types import Array, Float32Array, Int32Array, SamplingBatch, UInt64Array

GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy: division would leave float32's range."""

FIRST_WIDTH = 64
WIDTH_GROWTH = 8

BLOCK_BYTES = 8 * 2**20
"""Bound on the float32 scores of rows that are filtered together where every token is a candidate."""


@dataclass(frozen=True, slots=True)
class FilterRows:
    """Sampling parameters of the rows that are drawn together, as in ``SamplingBatch``."""

    temperature: Float32Array
    top_k: Int32Array
    top_p: Float32Array
    min_p: Float32Array
    seeds: UInt64Array
    positions: Int32Array

    @classmethod
    def of(cls, sampling: SamplingBatch, rows: Int32Array) -> FilterRows:
        """The parameters of some of a batch's rows."""
        return cls(
            sampling.temperature[rows],
            sampling.top_k[rows],
            sampling.top_p[rows],
            sampling.min_p[rows],
            sampling.seeds[rows],
            sampling.positions[rows],
        )

    def take(self, rows: Int32Array) -> FilterRows:
        """The parameters of some of these rows."""
        return FilterRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seeds[rows],
            self.positions[rows],
        )


def draw_unfiltered(ops: Ops, logits: Array, rows: FilterRows, vocab_size: int) -> Array:
    """Draw from the whole vocabulary; ``logits: [rows, vocab]``, returns int32 ``[rows, 1]``.

    Source: Maddison et al., "A* Sampling", section 2 (the Gumbel-max trick).
    """
    scores = ops.arithmetic(logits, "/", _column(ops, rows.temperature))
    noise = ops.gumbel(rows.seeds, rows.positions, vocab_size)
    return ops.topk(ops.arithmetic(scores, "+", noise), 1)[1]


class FilteredDraw:
    """Draws under filters from the most likely candidates, as many of them as the filters may keep.

    How many a nucleus takes stands on the device. A draw that may wait looks at a few candidates and takes more where
    they do not reach; one that may not takes the whole vocabulary at once for the rows that could need it. Both keep
    the same candidates and give the same tokens.
    """

    def __init__(self, ops: Ops, vocab_size: int, *, may_wait: bool = True) -> None:
        """Bind a draw.

        Args:
            ops: of the device.
            vocab_size: columns of the logits.
            may_wait: whether a draw may read from the device, and so wait for the step that gives the logits.
        """
        self._ops = ops
        self._vocab_size = vocab_size
        self._may_wait = may_wait

    def draw(self, logits: Array, rows: FilterRows) -> Array:
        """``logits: [rows, vocab]``; returns int32 ``[rows, 1]``."""
        ops = self._ops
        scores = ops.log_softmax(ops.arithmetic(logits, "/", _column(ops, rows.temperature)))
        tokens = ops.from_host(np.zeros((len(rows.seeds), 1), dtype=np.int32))
        if self._may_wait:
            return self._draw_widening(scores, rows, tokens)
        return self._draw_at_once(scores, rows, tokens)

    def _draw_widening(self, scores: Array, rows: FilterRows, tokens: Array) -> Array:
        """Take more candidates until no row keeps tokens beyond them."""
        ops = self._ops
        open_rows = np.arange(len(rows.seeds), dtype=np.int32)
        width = self._first_width
        while len(open_rows):
            candidates = self._candidates(scores, rows, open_rows, width)
            complete = candidates.complete()
            picked = candidates.pick()
            if complete.all():
                tokens = ops.scatter_rows(tokens, ops.from_host(open_rows), picked)
            elif complete.any():
                done = np.flatnonzero(complete).astype(np.int32)
                chosen = ops.gather_rows(picked, ops.from_host(done))
                tokens = ops.scatter_rows(tokens, ops.from_host(open_rows[done]), chosen)
            open_rows = open_rows[~complete]
            width = self._wider(width)
        return tokens

    def _draw_at_once(self, scores: Array, rows: FilterRows, tokens: Array) -> Array:
        """Take the candidates that top-k allows, and all of them where there is none; blocks bound the memory."""
        widths = self._sufficient_widths(rows.top_k)
        for width in np.unique(widths):
            members = np.flatnonzero(widths == width).astype(np.int32)
            block = max(1, BLOCK_BYTES // (4 * int(width)))
            for start in range(0, len(members), block):
                part = members[start : start + block]
                picked = self._candidates(scores, rows, part, int(width)).pick()
                tokens = self._ops.scatter_rows(tokens, self._ops.from_host(part), picked)
        return tokens

    def _candidates(self, scores: Array, rows: FilterRows, index: Int32Array, width: int) -> _Candidates:
        if len(index) < len(rows.seeds):
            scores = self._ops.gather_rows(scores, self._ops.from_host(index))
        return _Candidates(self._ops, scores, rows.take(index), width, self._vocab_size)

    def _sufficient_widths(self, top_k: Int32Array) -> Int32Array:
        """The first of the widths that a widening draw goes through that holds a row's top-k."""
        widths = np.full(len(top_k), self._vocab_size, dtype=np.int32)
        width = self._first_width
        ladder = [width]
        while width < self._vocab_size:
            width = self._wider(width)
            ladder.append(width)
        for width in reversed(ladder):
            widths[top_k <= width] = width
        return widths

    @property
    def _first_width(self) -> int:
        return min(FIRST_WIDTH, self._vocab_size)

    def _wider(self, width: int) -> int:
        return min(width * WIDTH_GROWTH, self._vocab_size)


class _Candidates:
    """The ``width`` most likely tokens of some rows, with what the filters make of them."""

    def __init__(self, ops: Ops, scores: Array, rows: FilterRows, width: int, vocab_size: int) -> None:
        """Filter; ``scores: [rows, vocab]`` are log-probabilities after temperature."""
        self._ops = ops
        self._rows = rows
        self._width = width
        self._vocab_size = vocab_size
        values, self._ids = ops.topk(scores, width)
        self._values = self._inside_top_k(values)
        shares = ops.exp(self._values)
        self._reached = ops.cumsum(shares)
        before = ops.arithmetic(self._reached, "-", shares)
        # p = 1 keeps everything, also where rounding lets the running sum reach 1 early
        self._limit = np.where(rows.top_p >= 1, np.inf, rows.top_p).astype(np.float32)
        kept = ops.where(ops.compare(before, "<", _column(ops, self._limit)), self._values, -np.inf)
        best = ops.take_columns(self._values, ops.from_host(np.zeros((len(rows.seeds), 1), dtype=np.int32)))
        with np.errstate(divide="ignore"):
            log_min_p = np.log(rows.min_p.astype(np.float64))
        self._floor = ops.arithmetic(best, "+", _column(ops, log_min_p))
        self._kept = ops.where(ops.compare(self._values, ">=", self._floor), kept, -np.inf)

    def complete(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which rows keep no token beyond these candidates."""
        settled = (self._rows.top_k <= self._width) | (self._width == self._vocab_size)
        if settled.all():
            return settled
        ops = self._ops
        last = ops.from_host(np.full((len(settled), 1), self._width - 1, dtype=np.int32))
        reached = ops.to_host(ops.take_columns(self._reached, last))[:, 0] >= self._limit
        beyond_floor = ops.to_host(ops.compare(ops.take_columns(self._values, last), "<", self._floor))[:, 0]
        # a row of NaN never reaches anything: its token does not matter, so it must not widen the search
        broken = np.isnan(ops.to_host(self._floor)[:, 0])
        # shares of a top-k that reaches beyond these candidates are not known yet
        shares_known = self._rows.top_k >= self._vocab_size
        return np.asarray(settled | broken | (shares_known & (reached | beyond_floor)), dtype=np.bool_)

    def pick(self) -> Array:
        """The candidate with the highest noisy score: int32 ``[rows, 1]``."""
        ops = self._ops
        seeds, positions = self._rows.seeds, self._rows.positions
        if self._width == self._vocab_size:
            # noise of all ids in order takes a quarter of the work
            noise = ops.take_columns(ops.gumbel(seeds, positions, self._vocab_size), self._ids)
        else:
            noise = ops.gumbel(seeds, positions, self._ids)
        place = ops.topk(ops.arithmetic(self._kept, "+", noise), 1)[1]
        return ops.take_columns(self._ids, place)

    def _inside_top_k(self, values: Array) -> Array:
        """Drop candidates beyond top-k and renormalize the rows that have one."""
        top_k = self._rows.top_k
        if (top_k >= self._vocab_size).all():
            return values
        ops = self._ops
        inside = np.arange(self._width)[None, :] < top_k[:, None]
        values = ops.where(ops.from_host(inside), values, -np.inf)
        limited = np.broadcast_to((top_k < self._vocab_size)[:, None], inside.shape)
        return ops.where(ops.from_host(limited), ops.log_softmax(values), values)


def _column(ops: Ops, values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Array:
    return ops.from_host(np.asarray(values, dtype=np.float32)[:, None])
