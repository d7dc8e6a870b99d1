"""Builds the sampling state of a step.

It does not know logits or noise; parameters that do not change from step to step are gathered once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cardan.scheduler.allowed import as_float32
from cardan.scheduler.request import Request
from cardan.scheduler.running import RowIndex
from cardan.scheduler.state import State
from cardan.types import BoolArray, Float32Array, Int32Array, PenaltySeed, SamplingBatch, UInt64Array


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Parameters of some rows that stay as long as the rows are the same."""

    rows: RowIndex
    version: int
    temperature: Float32Array
    top_k: Int32Array
    top_p: Float32Array
    min_p: Float32Array
    seeds: UInt64Array
    frequency_penalty: Float32Array
    presence_penalty: Float32Array
    repetition_penalty: Float32Array
    want_logprobs: BoolArray
    top_logprobs: Int32Array
    has_mask: BoolArray
    token_ids: tuple[tuple[int, ...], ...]
    biased: Int32Array


NO_INTS: Int32Array = np.empty(0, dtype=np.int32)
NO_FLOATS: Float32Array = np.empty(0, dtype=np.float32)
FORCING = 1e30
"""Added to a forced token's logit: beyond any other, and still a number where another bias is added to it."""


class SamplingAssembler:
    """Builds ``SamplingBatch`` for the rows that get a token."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._last: _Fixed | None = None

    def build(
        self,
        rows: RowIndex,
        row_ids: Int32Array,
        requests: list[Request],
        positions: Int32Array,
        new: tuple[Request, ...] = (),
    ) -> SamplingBatch:
        """Build the sampling state.

        Args:
            rows: rows ``[n]``, to index with.
            row_ids: the same, int32.
            requests: their requests.
            positions: int32 ``[n]``, where the sampled tokens will stand.
            new: those of ``requests`` that are new on the device.
        """
        fixed = self._fixed(rows, requests)
        bias_index, bias_ids, bias_values = self._biases(fixed.biased, requests, positions)
        return SamplingBatch(
            row_ids=row_ids,
            temperature=fixed.temperature,
            top_k=fixed.top_k,
            top_p=fixed.top_p,
            min_p=fixed.min_p,
            seeds=fixed.seeds,
            positions=positions,
            frequency_penalty=fixed.frequency_penalty,
            presence_penalty=fixed.presence_penalty,
            repetition_penalty=fixed.repetition_penalty,
            bias_index=bias_index,
            bias_ids=bias_ids,
            bias_values=bias_values,
            penalty_seeds=tuple(penalty_seed(request) for request in new if request.has_penalty) if new else (),
            want_logprobs=fixed.want_logprobs,
            top_logprobs=fixed.top_logprobs,
            logprob_token_ids=fixed.token_ids,
            has_mask=fixed.has_mask,
        )

    def _fixed(self, rows: RowIndex, requests: list[Request]) -> _Fixed:
        version, last = self._state.running.version, self._last
        if last is not None and last.version == version and last.rows is rows:
            return last
        arrays = self._state.memory.arrays
        token_ids: tuple[tuple[int, ...], ...] = ()
        if arrays.has_ids[rows].any():
            token_ids = tuple(request.logprobs.token_ids if request.logprobs.output else () for request in requests)
        self._last = _Fixed(
            rows=rows,
            version=version,
            temperature=arrays.temperature[rows],
            top_k=arrays.top_k[rows],
            top_p=arrays.top_p[rows],
            min_p=arrays.min_p[rows],
            seeds=arrays.seeds[rows],
            frequency_penalty=arrays.frequency_penalty[rows],
            presence_penalty=arrays.presence_penalty[rows],
            repetition_penalty=arrays.repetition_penalty[rows],
            want_logprobs=arrays.want_logprobs[rows],
            top_logprobs=arrays.top_logprobs[rows],
            has_mask=arrays.has_mask[rows],
            token_ids=token_ids,
            biased=np.flatnonzero(arrays.has_bias[rows]).astype(np.int32),
        )
        return self._last

    def _biases(
        self, biased: Int32Array, requests: list[Request], positions: Int32Array
    ) -> tuple[Int32Array, Int32Array, Float32Array]:
        """Sparse biases: those asked for, minus infinity on what would end a request too early, and forced tokens."""
        if biased.shape[0] == 0:
            return NO_INTS, NO_INTS, NO_FLOATS
        vocab_size = self._state.settings.vocab_size
        index: list[int] = []
        ids: list[int] = []
        values: list[float] = []
        for i in biased.tolist():
            request = requests[i]
            bias = dict(request.params.logit_bias)
            place = int(positions[i]) - request.num_prompt
            if place < request.params.min_new_tokens:
                bias.update((stop, -np.inf) for stop in request.stop_ids if 0 <= stop < vocab_size)
            if place < len(request.forced_output_ids):
                bias[request.forced_output_ids[place]] = FORCING
            index += [i] * len(bias)
            ids += bias.keys()
            values += bias.values()
        return np.asarray(index, np.int32), np.asarray(ids, np.int32), as_float32(values)


def penalty_seed(request: Request) -> PenaltySeed:
    """Which ids the prompt holds and how often each output id occurs, for a request that is new on the device."""
    output_ids, output_counts = np.unique(np.asarray(request.output_ids, dtype=np.int32), return_counts=True)
    return PenaltySeed(
        row_id=request.row,
        prompt_ids=NO_INTS if request.embeds is not None else np.unique(request.prompt),
        output_ids=output_ids,
        output_counts=output_counts.astype(np.int32),
    )
