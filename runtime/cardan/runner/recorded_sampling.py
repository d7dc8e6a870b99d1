"""The head and the sampling of plain decode steps, recorded once and run by one call from then on.

It knows no array library and no model. What it records is the sampler's own code, so its tokens are the sampler's;
batches that penalize, bias, mask or mix kinds of draws are left to that.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cardan.ops import Ops
from cardan.platform import OpsDevice, Recorder, Recording
from cardan.runner.candidates import (
    GREEDY_BELOW,
    Candidates,
    FilterRows,
    Inputs,
    Placed,
    draw_unfiltered,
    filter_inputs,
    first_width,
    plain_inputs,
    tempered,
)
from cardan.runner.sampler import Sampled, choose, settle
from cardan.types import Array, SamplingBatch

MOST_ROWS = 16
"""Larger batches compute for so long that calls of single operations do not show, and recordings hold their logits."""

MOST_RECORDINGS = 12
"""Kept; the one unused for longest goes first."""

_FIXED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seeds",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "has_mask",
)
"""Arrays that a scheduler gives again, the same objects, as long as a batch's rows stay."""


class Kind(enum.Enum):
    """What all rows of a batch do; ``LIMITED`` draws are filtered ones of which some have a top-k."""

    GREEDY = "greedy"
    PLAIN = "plain"
    FILTERED = "filtered"
    LIMITED = "limited"


@dataclass(frozen=True, slots=True)
class _Key:
    kind: Kind
    rows: int
    hidden: int


@dataclass(slots=True)
class _Recorded:
    """A recording with its arrays.

    Attributes:
        hidden: ``[rows, hidden]``, read; held, so that no other array gets its id.
        recording: of head and sampling.
        inputs: on the device, by name.
        logits: float32 ``[rows, vocab]``.
        sampled: tokens and failures.
        evidence: what tells whether filters keep tokens beyond the candidates, for draws that have some.
        filled: the batch whose fixed arrays the inputs hold.
    """

    hidden: Array
    recording: Recording
    inputs: dict[str, Array]
    logits: Array
    sampled: Sampled
    evidence: tuple[Array, ...]
    filled: SamplingBatch


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a recording gave: the logits, and the tokens where they are settled."""

    logits: Array
    sampled: Sampled | None


class RecordedSampling:
    """Recordings of one runner.

    Attributes:
        recorder: of its device.
    """

    def __init__(self, device: OpsDevice, recorder: Recorder, head: Callable[[Array], Array], vocab_size: int) -> None:
        """Bind.

        Args:
            device: whose ops are recorded.
            recorder: that it offers.
            head: from hidden states ``[rows, hidden]`` to logits ``[rows, vocab]``.
            vocab_size: columns of the logits.
        """
        self.recorder = recorder
        self._device = device
        self._head = head
        self._vocab_size = vocab_size
        self._recorded: OrderedDict[_Key, _Recorded] = OrderedDict()
        self._seen: tuple[SamplingBatch, Kind | None] | None = None
        self._unsettled: SamplingBatch | None = None

    @property
    def num_recordings(self) -> int:
        """How many are kept."""
        return len(self._recorded)

    def kind(self, sampling: SamplingBatch | None) -> Kind | None:
        """What all rows do, or None where the sampler has to look at them one by one."""
        if sampling is None or sampling.penalty_seeds or len(sampling.bias_index):
            return None
        if self._seen is None or not _same_rows(self._seen[0], sampling):
            self._seen = (sampling, _kind(sampling, self._vocab_size))
        kind = self._seen[1]
        drawn_before = self._unsettled is not None and _same_rows(self._unsettled, sampling)
        return None if drawn_before and kind is not Kind.GREEDY else kind

    def sample(self, kind: Kind, hidden: Array, sampling: SamplingBatch, last_tokens: Array) -> Outcome:
        """Head, choice and the rows' last tokens ``int32 [rows of the tables]``, by one call where it was made before.

        ``hidden`` must be an array that a replayed step gives again.
        """
        key = _Key(kind, len(sampling.row_ids), id(hidden))
        found = self._recorded.get(key)
        if found is None:
            found = self._recorded[key] = self._record(kind, hidden, sampling, last_tokens)
            if len(self._recorded) > MOST_RECORDINGS:
                self._recorded.popitem(last=False)
        else:
            self._fill(kind, found, sampling)
            found.recording.replay()
        self._recorded.move_to_end(key)
        if found.evidence and not self._settled(found, sampling):
            self._unsettled = sampling
            return Outcome(found.logits, None)
        return Outcome(found.logits, found.sampled)

    def _record(self, kind: Kind, hidden: Array, sampling: SamplingBatch, last_tokens: Array) -> _Recorded:
        ops = self._device.ops
        # seeds and positions are arrays here as well, so that they can be filled
        inputs = {name: ops.from_host(array) for name, array in self._inputs(kind, sampling).items()}

        def run() -> tuple[Array, ...]:
            logits = self._head(hidden)
            tokens, failed = choose(ops, logits, logits, len(sampling.row_ids))
            evidence: tuple[Array, ...] = ()
            if kind is not Kind.GREEDY:
                tokens, evidence = self._draw(ops, kind, logits, inputs)
            sampled = settle(ops, tokens, failed, len(sampling.row_ids))
            ops.scatter_rows(last_tokens, inputs["row_ids"], sampled.tokens)
            return (logits, sampled.tokens, sampled.failed, *evidence)

        recording, (logits, tokens, failed, *evidence) = self.recorder.record(run)
        return _Recorded(hidden, recording, inputs, logits, Sampled(tokens, failed), tuple(evidence), sampling)

    def _draw(self, ops: Ops, kind: Kind, logits: Array, inputs: Placed) -> tuple[Array, tuple[Array, ...]]:
        if kind is Kind.PLAIN:
            return draw_unfiltered(ops, logits, inputs, self._vocab_size), ()
        width = first_width(self._vocab_size)
        scores = tempered(ops, logits, inputs["temperature"])
        candidates = Candidates(ops, scores, inputs, width, self._vocab_size)
        return candidates.pick(), candidates.evidence()

    def _fill(self, kind: Kind, found: _Recorded, sampling: SamplingBatch) -> None:
        """Bring the inputs up to the step; those of rows that stay are there already."""
        fill = self.recorder.fill
        before, found.filled = found.filled, sampling
        if before.row_ids is not sampling.row_ids:
            fill(found.inputs["row_ids"], sampling.row_ids)
        if kind is Kind.GREEDY:
            return
        if _same_rows(before, sampling):
            fill(found.inputs["positions"], sampling.positions)
            return
        for name, array in self._inputs(kind, sampling).items():
            fill(found.inputs[name], array)

    def _inputs(self, kind: Kind, sampling: SamplingBatch) -> Inputs:
        inputs: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int32]]] = {"row_ids": sampling.row_ids}
        if kind is Kind.GREEDY:
            return inputs
        rows = FilterRows.all_of(sampling)
        plain = kind is Kind.PLAIN
        drawn = plain_inputs(rows) if plain else filter_inputs(rows, first_width(self._vocab_size), self._vocab_size)
        halves = np.ascontiguousarray(sampling.seeds, dtype="<u8").view(np.int32).reshape(-1, 2)
        return {**drawn, **inputs, "seeds": halves, "positions": sampling.positions}

    def _settled(self, found: _Recorded, sampling: SamplingBatch) -> bool:
        """Whether no row keeps tokens beyond the candidates; this waits for the device where filters leave it open."""
        rows, width = FilterRows.all_of(sampling), first_width(self._vocab_size)
        settled = rows.settled(width, self._vocab_size)
        if not settled.all():
            share, floor, last = (self._device.ops.to_host(part) for part in found.evidence)
            settled |= rows.reached(self._vocab_size, share, floor, last)
        return bool(settled.all())


def _same_rows(one: SamplingBatch, other: SamplingBatch) -> bool:
    """Whether two batches have the same arrays for what stays from step to step."""
    return one is other or all(getattr(one, name) is getattr(other, name) for name in _FIXED)


def _kind(sampling: SamplingBatch, vocab_size: int) -> Kind | None:
    if sampling.any_penalty or sampling.has_mask.any() or len(sampling.row_ids) > MOST_ROWS:
        return None
    drawing = sampling.temperature >= GREEDY_BELOW
    if not drawing.any():
        return Kind.GREEDY
    limited = sampling.top_k < vocab_size
    filters = limited | (sampling.top_p < 1) | (sampling.min_p > 0)
    if not drawing.all() or (filters.any() and not filters.all()):
        return None
    if not filters.any():
        return Kind.PLAIN
    return Kind.LIMITED if limited.any() else Kind.FILTERED
