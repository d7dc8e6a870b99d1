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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cardan.ops import Ops
from cardan.types import Array, BoolArray, Float32Array, Int32Array, SamplingBatch, UInt64Array

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

    @classmethod
    def all_of(cls, sampling: SamplingBatch) -> FilterRows:
        """The parameters of a batch's rows."""
        return cls(
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seeds,
            sampling.positions,
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

    def settled(self, width: int, vocab_size: int) -> BoolArray:
        """Rows that keep no token beyond ``width`` candidates, whatever their logits."""
        return np.asarray((self.top_k <= width) | (width == vocab_size), dtype=np.bool_)

    def reached(self, vocab_size: int, share: Float32Array, floor: Float32Array, last: Float32Array) -> BoolArray:
        """Rows that keep no token beyond some candidates, by what ``Candidates.evidence`` says of them."""
        limit = np.where(self.top_p >= 1, np.inf, self.top_p).astype(np.float32)
        # a row of NaN never reaches anything: its token does not matter, so it must not widen the search
        broken = np.isnan(floor[:, 0])
        # shares of a top-k that reaches beyond these candidates are not known yet
        shares_known = self.top_k >= vocab_size
        done = (share[:, 0] >= limit) | (last[:, 0] < floor[:, 0])
        return np.asarray(broken | (shares_known & done), dtype=np.bool_)


Inputs: TypeAlias = Mapping[str, "npt.NDArray[Any]"]
"""What a draw takes from the host, by name."""

Placed: TypeAlias = Mapping[str, Any]
"""The same on the device, but for seeds and positions, which may stand on the host (see ``Ops.gumbel``)."""

_KEYS = ("seeds", "positions")


def place(ops: Ops, inputs: Inputs) -> Placed:
    """Copy inputs to the device, as far as they have to be there."""
    return {name: array if name in _KEYS else ops.from_host(array) for name, array in inputs.items()}


def plain_inputs(rows: FilterRows) -> Inputs:
    """What ``draw_unfiltered`` takes."""
    return {"temperature": _column(rows.temperature), "seeds": rows.seeds, "positions": rows.positions}


def filter_inputs(rows: FilterRows, width: int, vocab_size: int) -> Inputs:
    """What a draw from ``width`` candidates takes; the last two only where a row has a top-k."""
    # p = 1 keeps everything, also where rounding lets the running sum reach 1 early
    limit = np.where(rows.top_p >= 1, np.inf, rows.top_p)
    with np.errstate(divide="ignore"):
        log_min_p = np.log(rows.min_p.astype(np.float64))
    inputs = {"limit": _column(limit), "log_min_p": _column(log_min_p), **plain_inputs(rows)}
    if (rows.top_k < vocab_size).any():
        inside = np.arange(width)[None, :] < rows.top_k[:, None]
        inputs["inside"] = inside
        inputs["limited"] = np.ascontiguousarray(np.broadcast_to((rows.top_k < vocab_size)[:, None], inside.shape))
    return inputs


def draw_unfiltered(ops: Ops, logits: Array, inputs: Placed, vocab_size: int) -> Array:
    """Draw from the whole vocabulary; ``logits: [rows, vocab]``, returns int32 ``[rows, 1]``.

    Source: Maddison et al., "A* Sampling", section 2 (the Gumbel-max trick).
    """
    scores = ops.arithmetic(logits, "/", inputs["temperature"])
    noise = ops.gumbel(inputs["seeds"], inputs["positions"], vocab_size)
    return ops.topk(ops.arithmetic(scores, "+", noise), 1)[1]


def tempered(ops: Ops, logits: Array, temperature: Array) -> Array:
    """Log-probabilities after temperature ``[rows, 1]``, which filters look at."""
    return ops.log_softmax(ops.arithmetic(logits, "/", temperature))


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
        scores = tempered(ops, logits, ops.from_host(_column(rows.temperature)))
        tokens = ops.from_host(np.zeros((len(rows.seeds), 1), dtype=np.int32))
        if self._may_wait:
            return self._draw_widening(scores, rows, tokens)
        return self._draw_at_once(scores, rows, tokens)

    def _draw_widening(self, scores: Array, rows: FilterRows, tokens: Array) -> Array:
        """Take more candidates until no row keeps tokens beyond them."""
        ops = self._ops
        open_rows = np.arange(len(rows.seeds), dtype=np.int32)
        width = first_width(self._vocab_size)
        while len(open_rows):
            part = rows.take(open_rows)
            candidates = self._candidates(scores, rows, open_rows, width)
            picked = candidates.pick()
            settled = part.settled(width, self._vocab_size)
            complete = settled if settled.all() else settled | self._reach(candidates, part)
            if complete.all():
                tokens = ops.scatter_rows(tokens, ops.from_host(open_rows), picked)
            elif complete.any():
                done = np.flatnonzero(complete).astype(np.int32)
                chosen = ops.gather_rows(picked, ops.from_host(done))
                tokens = ops.scatter_rows(tokens, ops.from_host(open_rows[done]), chosen)
            open_rows = open_rows[~complete]
            width = self._wider(width)
        return tokens

    def _reach(self, candidates: Candidates, rows: FilterRows) -> BoolArray:
        last, floor, beyond = (self._ops.to_host(part) for part in candidates.evidence())
        return rows.reached(self._vocab_size, last, floor, beyond)

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

    def _candidates(self, scores: Array, rows: FilterRows, index: Int32Array, width: int) -> Candidates:
        if len(index) < len(rows.seeds):
            scores = self._ops.gather_rows(scores, self._ops.from_host(index))
        inputs = place(self._ops, filter_inputs(rows.take(index), width, self._vocab_size))
        return Candidates(self._ops, scores, inputs, width, self._vocab_size)

    def _sufficient_widths(self, top_k: Int32Array) -> Int32Array:
        """The first of the widths that a widening draw goes through that holds a row's top-k."""
        widths = np.full(len(top_k), self._vocab_size, dtype=np.int32)
        width = first_width(self._vocab_size)
        ladder = [width]
        while width < self._vocab_size:
            width = self._wider(width)
            ladder.append(width)
        for width in reversed(ladder):
            widths[top_k <= width] = width
        return widths

    def _wider(self, width: int) -> int:
        return min(width * WIDTH_GROWTH, self._vocab_size)


def first_width(vocab_size: int) -> int:
    """How many candidates a draw begins with."""
    return min(FIRST_WIDTH, vocab_size)


class Candidates:
    """The ``width`` most likely tokens of some rows, with what the filters make of them."""

    def __init__(self, ops: Ops, scores: Array, inputs: Placed, width: int, vocab_size: int) -> None:
        """Filter.

        Args:
            ops: of the device.
            scores: ``[rows, vocab]``, log-probabilities after temperature.
            inputs: what ``filter_inputs`` gives.
            width: how many candidates.
            vocab_size: columns of the scores.
        """
        self._ops = ops
        self._inputs = inputs
        self._width = width
        self._vocab_size = vocab_size
        values, self._ids = ops.topk(scores, width)
        self._values = self._inside_top_k(values)
        shares = ops.exp(self._values)
        self._reached = ops.cumsum(shares)
        before = ops.arithmetic(self._reached, "-", shares)
        kept = ops.where(ops.compare(before, "<", inputs["limit"]), self._values, -np.inf)
        first = ops.from_host(np.zeros((self._num_rows, 1), dtype=np.int32))
        self._floor = ops.arithmetic(ops.take_columns(self._values, first), "+", inputs["log_min_p"])
        self._kept = ops.where(ops.compare(self._values, ">=", self._floor), kept, -np.inf)

    def evidence(self) -> tuple[Array, Array, Array]:
        """What tells whether tokens beyond these candidates are kept: ``[rows, 1]`` each.

        The share that all of them reach, the least log-probability that min-p keeps, and that of the last candidate.
        """
        ops = self._ops
        last = ops.from_host(np.full((self._num_rows, 1), self._width - 1, dtype=np.int32))
        return ops.take_columns(self._reached, last), self._floor, ops.take_columns(self._values, last)

    def pick(self) -> Array:
        """The candidate with the highest noisy score: int32 ``[rows, 1]``."""
        ops = self._ops
        seeds, positions = (self._inputs[name] for name in _KEYS)
        if self._width == self._vocab_size:
            # noise of all ids in order takes a quarter of the work
            noise = ops.take_columns(ops.gumbel(seeds, positions, self._vocab_size), self._ids)
        else:
            noise = ops.gumbel(seeds, positions, self._ids)
        place_of_best = ops.topk(ops.arithmetic(self._kept, "+", noise), 1)[1]
        return ops.take_columns(self._ids, place_of_best)

    @property
    def _num_rows(self) -> int:
        return int(self._inputs["positions"].shape[0])

    def _inside_top_k(self, values: Array) -> Array:
        """Drop candidates beyond top-k and renormalize the rows that have one."""
        if "inside" not in self._inputs:
            return values
        ops = self._ops
        values = ops.where(self._inputs["inside"], values, -np.inf)
        return ops.where(self._inputs["limited"], ops.log_softmax(values), values)


def _column(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(values, dtype=np.float32)[:, None]
