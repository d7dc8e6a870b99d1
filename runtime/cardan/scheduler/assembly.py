"""Builds the batch of a step from prompt stretches and decode rows.

It decides nothing; slots were taken before.
"""

from __future__ import annotations

import numpy as np

from cardan.scheduler.memory import RowMemory
from cardan.scheduler.request import Request
from cardan.scheduler.running import ONE, RowIndex
from cardan.scheduler.sampling import SamplingAssembler
from cardan.scheduler.state import Extend, Scheduled, State
from cardan.scheduler.vectors import NO_STATES, WantedStates, given_embeds
from cardan.types import Batch, ForwardMode, Int32Array, PooledSpans, Pooling, PromptLogprobs


class BatchAssembler:
    """Turns what was chosen into arrays."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._sampling = SamplingAssembler(state)
        self._ramp: Int32Array = np.arange(state.settings.num_rows + 1, dtype=np.int32)

    def decode(self, rows: RowIndex) -> Scheduled:
        """The newest token of each row, and what was forced before it; there is room for them."""
        state = self._state
        if state.memory.arrays.forced:
            return self.prefill([], rows)
        memory, arrays, count = state.memory, state.memory.arrays, rows.shape[0]
        pending = arrays.pending[rows]
        input_ids = self._newest(rows, pending)
        if rows is state.running.rows and state.lanes.all_decode:
            row_ids = state.running.row_ids
            positions, slots, seq_lens = memory.extend_lanes(state.lanes, row_ids)
        else:
            row_ids = rows.astype(np.int32)
            positions, slots = memory.extend_decode(rows, row_ids)
            seq_lens = positions + ONE
        arrays.pending[rows] = pending + ONE
        requests, rids = self._names(rows)
        sampling = self._sampling.build(rows, row_ids, requests, seq_lens)
        wanted = NO_STATES
        if arrays.num_hidden:
            wanted = WantedStates.of(requests, positions, np.ones(count, dtype=np.int32))
        batch = Batch(
            mode=ForwardMode.DECODE,
            input_ids=input_ids,
            positions=positions,
            query_starts=self._ramp[: count + 1],
            seq_lens=seq_lens,
            row_ids=row_ids,
            out_slots=memory.by_group(slots),
            table_deltas=memory.begin_step(),
            logits_at=self._ramp[:count],
            sampling=sampling,
            hidden_at=wanted.index,
        )
        return Scheduled(batch=batch, requests=requests, rids=rids, rows=rows, hidden=wanted.owners)

    def prefill(self, extends: list[Extend], riding: RowIndex) -> Scheduled:
        """Stretches of prompts, then the tokens of each riding row."""
        state = self._state
        memory, arrays = state.memory, state.memory.arrays
        parts = _Parts.of(extends, memory)
        rows = np.asarray([extend.row for extend in extends], dtype=np.intp)
        counts = np.asarray([extend.count for extend in extends], dtype=np.int32)
        jumped: tuple[Request, ...] = ()
        if riding.shape[0]:
            ride_counts = arrays.tokens_to_compute(riding)
            jumped = self._owners(riding[ride_counts > 1])
            parts = parts.followed_by(self._ride(riding, ride_counts))
            rows = np.concatenate((rows, riding))
            counts = np.concatenate((counts, ride_counts))
        starts = np.concatenate((np.zeros(1, dtype=np.int32), np.cumsum(counts, dtype=np.int32)))
        samples = np.asarray([extend.samples for extend in extends] + [True] * riding.shape[0], dtype=bool)
        sampled = rows[samples]
        requests, rids = self._names(sampled)
        seq_lens = arrays.seq_len[rows]
        sampling = None
        row_ids = rows.astype(np.int32)
        if requests:
            new = (*(extend.request for extend in extends if extend.samples), *jumped)
            sampling = self._sampling.build(sampled, row_ids[samples], requests, seq_lens[samples], new)
        logprobs, logprob_counts = _prompt_logprobs(extends)
        spans, pooled = _pooled_spans(extends)
        wanted = NO_STATES
        if arrays.num_hidden:
            owners = [*(extend.request for extend in extends), *self._owners(riding)]
            wanted = WantedStates.of(owners, parts.positions[starts[:-1]], counts)
        batch = Batch(
            mode=ForwardMode.MIXED if riding.shape[0] and state.settings.mixed_batch else ForwardMode.EXTEND,
            input_ids=parts.input_ids,
            positions=parts.positions,
            query_starts=starts,
            seq_lens=seq_lens,
            row_ids=row_ids,
            out_slots=memory.by_group(parts.slots),
            table_deltas=memory.begin_step(),
            logits_at=starts[1:][samples] - ONE,
            sampling=sampling,
            prompt_logprobs=logprobs,
            pooled=spans,
            hidden_at=wanted.index,
            embeds=given_embeds(extends),
        )
        arrays.pending[sampled] += 1
        return Scheduled(
            batch=batch,
            requests=requests,
            rids=rids,
            rows=sampled,
            extends=tuple(extends),
            prompt_logprob_counts=logprob_counts,
            pooled=pooled,
            hidden=wanted.owners,
        )

    def _ride(self, rows: RowIndex, counts: Int32Array) -> _Parts:
        """Tokens of rows that decode: the newest of each, and those forced before it."""
        memory, arrays = self._state.memory, self._state.memory.arrays
        newest = self._newest(rows, arrays.pending[rows])
        if (counts == 1).all():
            return _Parts(newest, *memory.extend_decode(rows, rows.astype(np.int32)))
        ids = np.repeat(newest, counts)
        ends = np.cumsum(counts)
        for index in np.flatnonzero(counts > 1).tolist():
            (request,) = self._owners(rows[index : index + 1])
            ids[ends[index] - counts[index] : ends[index]] = request.output_ids[-int(counts[index]) :]
        return _Parts(ids, *memory.extend_rows(rows, counts))

    def _newest(self, rows: RowIndex, pending: Int32Array) -> Int32Array:
        """The newest token of each row, -1 where a step in flight samples it."""
        last_token = self._state.memory.arrays.last_token[rows]
        if not np.count_nonzero(pending):
            return last_token
        return np.where(pending > 0, np.int32(-1), last_token)

    def _owners(self, rows: RowIndex) -> tuple[Request, ...]:
        owners = self._state.memory.arrays.requests
        return tuple(owner for row in rows.tolist() if (owner := owners[row]) is not None)

    def _names(self, rows: RowIndex) -> tuple[list[Request], list[str]]:
        running = self._state.running
        if rows is running.rows:
            return running.requests, running.rids
        requests = list(self._owners(rows))
        return requests, [request.rid for request in requests]


NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)


class _Parts:
    """Tokens of all stretches, concatenated."""

    __slots__ = ("input_ids", "positions", "slots")

    def __init__(self, input_ids: Int32Array, positions: Int32Array, slots: Int32Array) -> None:
        self.input_ids = input_ids
        self.positions = positions
        self.slots = slots

    @classmethod
    def of(cls, extends: list[Extend], memory: RowMemory) -> _Parts:
        """Read the stretches off the requests and the table."""
        if not extends:
            return cls(NO_TOKENS, NO_TOKENS, NO_TOKENS)
        spans = [(extend, extend.start + extend.count) for extend in extends]
        return cls(
            np.concatenate([extend.request.sequence()[extend.start : stop] for extend, stop in spans]),
            np.concatenate([np.arange(extend.start, stop, dtype=np.int32) for extend, stop in spans]),
            np.concatenate([memory.table.slots[extend.row, extend.start : stop] for extend, stop in spans]),
        )

    def followed_by(self, other: _Parts) -> _Parts:
        """These tokens, then those of ``other``."""
        return _Parts(
            np.concatenate((self.input_ids, other.input_ids)),
            np.concatenate((self.positions, other.positions)),
            np.concatenate((self.slots, other.slots)),
        )


def _pooled_spans(extends: list[Extend]) -> tuple[PooledSpans | None, tuple[Request, ...]]:
    """Stretches whose hidden states are wanted, and whose they are. What an earlier step sums is left out."""
    spans: list[tuple[int, int]] = []
    owners: list[Request] = []
    offset = 0
    for extend in extends:
        request, stop = extend.request, extend.start + extend.count
        begin = stop
        if request.pooling is Pooling.MEAN:
            begin = max(extend.start, request.pool_planned)
        elif request.pooling is Pooling.LAST and extend.final:
            begin = max(stop - 1, request.pool_planned)
        if begin < stop:
            request.pool_planned = stop
            spans.append((begin - extend.start + offset, stop - extend.start + offset))
            owners.append(request)
        offset += extend.count
    if not spans:
        return None, ()
    starts, stops = np.asarray(spans, dtype=np.int32).T
    return PooledSpans(starts=starts, stops=stops), tuple(owners)


def _prompt_logprobs(extends: list[Extend]) -> tuple[PromptLogprobs | None, tuple[int, ...]]:
    """Positions of the stretches after which a prompt token's logprob is wanted, and how many each has."""
    index: list[Int32Array] = []
    targets: list[Int32Array] = []
    top: list[int] = []
    token_ids: list[tuple[int, ...]] = []
    counts: list[int] = []
    offset = 0
    for extend in extends:
        request = extend.request
        first = request.next_prompt_logprob
        stop = min(extend.start + extend.count + 1, request.num_prompt)
        start = stop if first is None else max(first, extend.start + 1)
        count = max(stop - start, 0)
        if count:
            index.append(np.arange(start - 1, stop - 1, dtype=np.int32) + np.int32(offset - extend.start))
            targets.append(request.prompt[start:stop])
            top += [request.logprobs.top] * count
            token_ids += [request.logprobs.token_ids] * count
        counts.append(count)
        offset += extend.count
    if not index:
        return None, tuple(counts)
    wanted = PromptLogprobs(
        token_index=np.concatenate(index),
        targets=np.concatenate(targets),
        top=np.asarray(top, dtype=np.int32),
        token_ids=tuple(token_ids) if any(token_ids) else (),
    )
    return wanted, tuple(counts)
