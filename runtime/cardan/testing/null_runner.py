"""The null platform's pool, runner and step: token ids are kept where KV would be, and hashed into the next token.

It computes nothing of a model. Whatever the scheduler gets wrong in slots, tables, chunks or prefixes
changes the sequence that a row reads back, and so its tokens; what can be seen to be wrong raises at once.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cardan.platform import KVPool, Runner, Step
from cardan.testing.null_tokens import (
    Choice,
    SequenceHasher,
    Vocabulary,
    made_up_logits,
    next_token,
    next_tokens,
    token_logprobs,
)
from cardan.types import (
    Batch,
    BoolArray,
    Float32Array,
    Float64Array,
    Int32Array,
    KVLayout,
    SamplingBatch,
    StepResult,
    TableDelta,
    TableDeltas,
    TokenLogprobs,
    UInt64Array,
)

_NEVER_WRITTEN = -7
_MAX_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NullTiming:
    """Simulated speed and faults.

    Attributes:
        step_s: seconds each step takes.
        token_s: seconds each token of a step takes on top.
        crash_after: the step after this many raises; 0 never.
        nan_token: a row whose last input is this id reports NaN; -1 never.
    """

    step_s: float = 0.0
    token_s: float = 0.0
    crash_after: int = 0
    nan_token: int = -1


class NullKVPool(KVPool):
    """Token ids by slot, ``int64 [groups, slots]``, and row-to-slot tables, ``int64 [groups, rows, length]``."""

    def __init__(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> None:
        self.tokens = np.full((layout.num_groups, num_slots), _NEVER_WRITTEN, np.int64)
        self.tables = np.zeros((layout.num_groups, num_rows, max_length), np.int64)
        self._num_bytes = num_slots * layout.bytes_per_slot

    @property
    def num_bytes(self) -> int:
        """Bytes that a real pool of this layout would take."""
        return self._num_bytes

    def update_tables(self, deltas: Sequence[TableDelta]) -> None:
        """Write new columns of the row-to-slot tables."""
        flat = TableDeltas.of(deltas)
        length = self.tables.shape[2]
        if flat.positions.max(initial=-1) >= length:
            row = int(flat.rows[flat.positions.argmax()])
            raise RuntimeError(
                f"A row has room for {length} tokens, got position {flat.positions.max()} for row {row}. "
                "Let sequences end at the length that the tables were allocated for."
            )
        self.tables[:, flat.rows, flat.positions] = flat.slots

    def write(self, row_ids: Int32Array, positions: Int32Array, slots: Int32Array, ids: Int32Array) -> None:
        """Keep one token per slot: ``slots: [groups, n]``, the rest ``[n]``; live rows never write to slot 0.

        Raises:
            RuntimeError: a slot is not the one that the row's table names for the position.
        """
        live = row_ids != 0
        named = self.tables[:, row_ids[live], positions[live]]
        if (named != slots[:, live]).any():
            raise RuntimeError(f"Slots {slots[:, live].tolist()} are written, but the tables name {named.tolist()}.")
        if (slots[:, live] == 0).any():
            raise RuntimeError("A live row writes to slot 0, which is padding.")
        groups = np.arange(self.tokens.shape[0])[:, None]
        self.tokens[groups, slots] = ids

    def sequences(self, row_ids: Int32Array, lengths: Int32Array) -> npt.NDArray[np.int64]:
        """Tokens of rows, read back through their tables: ``int64 [n, longest]``, 0 beyond ``lengths``.

        Raises:
            RuntimeError: a slot of a row was never written, or the groups hold different tokens.
        """
        longest = int(lengths.max(initial=0))
        inside = np.arange(longest) < lengths[:, None]
        of_groups = [
            tokens.take(table[row_ids, :longest]) * inside
            for tokens, table in zip(self.tokens, self.tables, strict=True)
        ]
        if (of_groups[0] == _NEVER_WRITTEN).any():
            raise RuntimeError(f"A row of {row_ids.tolist()} reads a slot that was never written.")
        if any((read != of_groups[0]).any() for read in of_groups[1:]):
            raise RuntimeError(f"The KV groups of a row of {row_ids.tolist()} hold different tokens.")
        return of_groups[0]


@dataclass(slots=True)
class _RowState:
    """What a device keeps of a row between steps: the sampled token and counts for penalties."""

    last_token: int | None = None
    prompt_ids: frozenset[int] = frozenset()
    output_counts: dict[int, int] = field(default_factory=dict)


class NullStep(Step):
    """A step whose hashes are computed; its tokens are chosen by ``sample`` and readable when its time has passed."""

    def __init__(self, runner: NullRunner, batch: Batch, hashes: UInt64Array, ready_s: float) -> None:
        self._runner = runner
        self._batch = batch
        self._hashes = hashes
        self._ready_s = ready_s
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._result: StepResult | None = None
        self._read = False

    def logits(self, rows: Sequence[int]) -> Float32Array:
        """Made-up logits of some rows."""
        return self._runner.logits(self._hashes[list(rows)])

    def sample(
        self,
        sampling: SamplingBatch | None = None,
        mask: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        """Choose the tokens of the rows that sample."""
        if self._result is not None:
            raise RuntimeError("Step.sample was called twice.")
        chosen = sampling or self._batch.sampling
        self._result = self._runner.choose(self._batch, self._hashes, chosen, mask)

    def result(self) -> StepResult:
        """Wait until the simulated device is done and give the tokens."""
        if self._result is None:
            raise RuntimeError("Step.result was called before Step.sample.")
        wait_s = self._ready_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        if not self._read:
            self._read = True
            self._runner.finished()
        return self._result


class NullRunner(Runner):
    """Runs steps over a ``NullKVPool``."""

    def __init__(self, pool: NullKVPool, vocabulary: Vocabulary, timing: NullTiming) -> None:
        self._pool = pool
        self._vocabulary = vocabulary
        self._timing = timing
        self._hasher = SequenceHasher()
        self._rows: dict[int, _RowState] = {}
        self._busy_until_s = 0.0
        self._num_steps = 0
        self._in_flight = 0

    def warm_up(self, buckets: Sequence[int]) -> None:
        """Nothing has to be warmed up."""

    def close(self) -> None:
        """Nothing is held."""

    def finished(self) -> None:
        """A step was read."""
        self._in_flight -= 1

    def launch(self, batch: Batch) -> Step:
        """Apply the deltas, keep the tokens, hash the sequences whose next token is wanted."""
        self._num_steps += 1
        if self._timing.crash_after and self._num_steps > self._timing.crash_after:
            raise RuntimeError(f"The null device was told to fail after {self._timing.crash_after} steps.")
        self._in_flight += 1
        if self._in_flight > _MAX_IN_FLIGHT:
            raise RuntimeError(f"{self._in_flight} steps are in flight, at most {_MAX_IN_FLIGHT} may be.")
        self._pool.update_tables(batch.table_deltas)
        rows = np.repeat(batch.row_ids, np.diff(batch.query_starts))
        ids = self._known_ids(batch, rows)
        self._pool.write(rows, batch.positions, batch.out_slots, ids)
        hashes = self._hash(rows[batch.logits_at], batch.positions[batch.logits_at])
        taken_s = self._timing.step_s + self._timing.token_s * batch.num_tokens
        self._busy_until_s = max(self._busy_until_s, time.monotonic()) + taken_s
        return NullStep(self, batch, hashes, self._busy_until_s)

    def _known_ids(self, batch: Batch, rows: Int32Array) -> Int32Array:
        ids = batch.input_ids.copy()
        if batch.embeds is not None:
            places, vectors = batch.embeds
            ids[places] = [zlib.crc32(vector.tobytes()) % self._vocabulary.size for vector in vectors]
        for index in np.flatnonzero(ids == -1):
            state = self._rows.get(int(rows[index]))
            last = None if state is None else state.last_token
            if last is None:
                raise RuntimeError(
                    f"An input of -1 must stand for a row's last sampled token, got row {rows[index]}, which has none. "
                    "Give its first tokens by their ids."
                )
            ids[index] = last
        return ids

    def _hash(self, row_ids: Int32Array, positions: Int32Array) -> UInt64Array:
        lengths = positions + np.int32(1)
        return self._hasher.rows(self._pool.sequences(row_ids, lengths), lengths)

    def choose(
        self,
        batch: Batch,
        hashes: UInt64Array,
        sampling: SamplingBatch | None,
        mask: npt.NDArray[np.uint32] | None,
    ) -> StepResult:
        """Choose the token of each row that samples, and make up the logprobs that were asked for."""
        prompt, pooled, hidden = self._prompt_logprobs(batch), self._pooled(batch), self._hidden(batch)
        if sampling is None:
            none = np.zeros(0, np.int32)
            failed = np.zeros(0, np.bool_)
            return StepResult(tokens=none, failed=failed, prompt_logprobs=prompt, pooled=pooled, hidden=hidden)
        for seed in sampling.penalty_seeds:
            counts = zip(seed.output_ids.tolist(), seed.output_counts.tolist(), strict=True)
            prompt_ids = frozenset(seed.prompt_ids.tolist())
            self._rows[seed.row_id] = _RowState(None, prompt_ids, dict(counts))
        tokens = next_tokens(hashes, sampling, self._vocabulary).astype(np.int32)
        failed = self._nan_rows(batch)
        counted = sampling.any_penalty
        for index, row_id in enumerate(sampling.row_ids.tolist()):
            state = self._rows.setdefault(row_id, _RowState())
            if tokens[index] < 0:
                token = next_token(int(hashes[index]), _choice(sampling, index, state, mask), self._vocabulary)
                failed[index] |= token is None
                tokens[index] = token or 0
            state.last_token = int(tokens[index])
            if counted:
                state.output_counts[state.last_token] = state.output_counts.get(state.last_token, 0) + 1
        logprobs: tuple[TokenLogprobs | None, ...] = ()
        if sampling.want_logprobs.any():
            found = (self._logprobs(sampling, i, int(hashes[i]), int(tokens[i])) for i in range(len(hashes)))
            logprobs = tuple(found)
        return StepResult(
            tokens=tokens, failed=failed, logprobs=logprobs, prompt_logprobs=prompt, pooled=pooled, hidden=hidden
        )

    def logits(self, hashes: UInt64Array) -> Float32Array:
        """Made-up logits after sequences, ``[n, vocab]``."""
        return np.stack([made_up_logits(sequence_hash, self._vocabulary) for sequence_hash in hashes.tolist()])

    def _nan_rows(self, batch: Batch) -> BoolArray:
        """Sampled rows whose last input is the token that was named for it."""
        if self._timing.nan_token < 0:
            return np.zeros(len(batch.logits_at), np.bool_)
        rows = np.repeat(batch.row_ids, np.diff(batch.query_starts))
        slots = self._pool.tables[0, rows[batch.logits_at], batch.positions[batch.logits_at]]
        return np.asarray(self._pool.tokens[0, slots] == self._timing.nan_token)

    def _logprobs(self, sampling: SamplingBatch, index: int, sequence_hash: int, token: int) -> TokenLogprobs | None:
        if not sampling.want_logprobs[index]:
            return None
        wanted = sampling.logprob_token_ids[index] if sampling.logprob_token_ids else ()
        return token_logprobs(sequence_hash, token, int(sampling.top_logprobs[index]), wanted, self._vocabulary)

    def _pooled(self, batch: Batch) -> Float64Array | None:
        """Hidden states are the bytes of a sequence's hash, as shares of 255."""
        if batch.pooled is None:
            return None
        spans = zip(batch.pooled.starts.tolist(), batch.pooled.stops.tolist(), strict=True)
        sums = [self._states(batch, np.arange(start, stop)).sum(axis=0) for start, stop in spans]
        return np.asarray(sums, dtype=np.float64)

    def _hidden(self, batch: Batch) -> Float32Array | None:
        return None if batch.hidden_at is None else self._states(batch, batch.hidden_at).astype(np.float32)

    def _states(self, batch: Batch, index: npt.NDArray[Any]) -> Float64Array:
        """Hidden states of tokens of a batch, ``[n, 8]``."""
        rows = np.repeat(batch.row_ids, np.diff(batch.query_starts))
        hashes = self._hash(rows[index], batch.positions[index])
        return np.asarray(hashes.astype("<u8").view(np.uint8).reshape(-1, 8) / 255)

    def _prompt_logprobs(self, batch: Batch) -> tuple[TokenLogprobs, ...]:
        wanted = batch.prompt_logprobs
        if wanted is None:
            return ()
        rows = np.repeat(batch.row_ids, np.diff(batch.query_starts))
        hashes = self._hash(rows[wanted.token_index], batch.positions[wanted.token_index])
        found = []
        for index, sequence_hash in enumerate(hashes.tolist()):
            ids = wanted.token_ids[index] if wanted.token_ids else ()
            target, top = int(wanted.targets[index]), int(wanted.top[index])
            found.append(token_logprobs(sequence_hash, target, top, ids, self._vocabulary))
        return tuple(found)


def _choice(sampling: SamplingBatch, index: int, state: _RowState, mask: npt.NDArray[np.uint32] | None) -> Choice:
    of_row = sampling.bias_index == index
    bias: dict[int, float] = {}
    for token, value in zip(sampling.bias_ids[of_row].tolist(), sampling.bias_values[of_row].tolist(), strict=True):
        bias[token] = bias.get(token, 0.0) + value
    masked = mask is not None and bool(sampling.has_mask[index])
    words = mask[index] if mask is not None and masked else None

    def allowed(token: int) -> bool:
        return words is None or bool((int(words[token // 32]) >> (token % 32)) & 1)

    return Choice(
        temperature=float(sampling.temperature[index]),
        top_k=int(sampling.top_k[index]),
        top_p=float(sampling.top_p[index]),
        min_p=float(sampling.min_p[index]),
        seed=int(sampling.seeds[index]),
        position=int(sampling.positions[index]),
        penalties=(
            float(sampling.frequency_penalty[index]),
            float(sampling.presence_penalty[index]),
            float(sampling.repetition_penalty[index]),
        ),
        prompt_ids=state.prompt_ids,
        output_counts=state.output_counts,
        bias=bias,
        given=_given(sampling, index),
        allowed=allowed if words is not None else None,
    )


def _given(sampling: SamplingBatch, index: int) -> Float32Array | None:
    rows, logits = sampling.given_logits or ((), ())
    return next((of_row for row, of_row in zip(rows, logits, strict=True) if row == index), None)
