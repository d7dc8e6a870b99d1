"""A device whose tokens are a hash of each row's whole sequence, read back through slots, table and positions.

A wrong slot, table entry, position or order of steps changes the tokens, or fails at once. What a request should get
is computed from its prompt alone by ``expected_output``.
"""

from __future__ import annotations

import zlib
from collections import Counter

import numpy as np

from cardan.scheduler import Request, SchedulerSettings
from cardan.types import Batch, FinishKind, Int32Array, SamplingBatch, StepResult, TokenLogprobs

VOCAB_SIZE = 97


def hash_of(sequence: Int32Array, seed: int) -> int:
    return zlib.crc32(np.asarray(sequence, dtype=np.int32).tobytes(), seed & 0xFFFF)


def next_token(sequence: Int32Array, seed: int) -> int:
    """The token that follows a sequence."""
    return hash_of(sequence, seed) % VOCAB_SIZE


def fails(sequence: Int32Array, seed: int, failure_rate: int) -> bool:
    """Whether the row fails instead; one in ``failure_rate`` does, none for 0."""
    return failure_rate > 0 and (hash_of(sequence, seed) >> 8) % failure_rate == 0


def prompt_logprob(prefix: Int32Array, target: int) -> float:
    """The made-up logprob of a token after a prefix."""
    return -float(zlib.crc32(np.append(prefix, target).astype(np.int32).tobytes()) % 10_000) / 100


def expected_output(request: Request, failure_rate: int = 0) -> tuple[list[int], FinishKind]:
    """Tokens of a request that runs alone, and why it ends."""
    sequence = list(request.prompt.tolist())
    output: list[int] = []
    least = request.params.min_new_tokens
    while len(output) < request.max_new_tokens:
        if fails(np.asarray(sequence), request.seed, failure_rate):
            return output, FinishKind.ERROR
        token = next_token(np.asarray(sequence), request.seed)
        while len(output) < least and token in request.stop_ids:
            token = (token + 1) % VOCAB_SIZE
        sequence.append(token)
        output.append(token)
        if request.stop is not None and request.stop.check(output, 1) is not None:
            return output, FinishKind.STOP
        if token in request.stop_ids:
            return output, FinishKind.STOP
    return output, FinishKind.LENGTH


class FakeDevice:
    """Runs batches in order, at once."""

    def __init__(self, settings: SchedulerSettings, failure_rate: int = 0) -> None:
        size = settings.num_slots + settings.page_size
        self.tokens = np.full(size, -7, dtype=np.int32)
        self.positions = np.full(size, -7, dtype=np.int32)
        self.table = np.zeros((settings.num_rows, settings.context_length), dtype=np.int32)
        self.last_token = np.full(settings.num_rows, -7, dtype=np.int32)
        self.page_size = settings.page_size
        self.failure_rate = failure_rate
        self.prompt_ids: dict[int, set[int]] = {}
        self.output_counts: dict[int, Counter[int]] = {}

    def launch(self, batch: Batch) -> StepResult:
        deltas = batch.table_deltas
        places = list(zip(deltas.rows.tolist(), deltas.positions.tolist(), strict=True))
        assert len(set(places)) == len(places), "the order of changes to one place would matter"
        self.table[deltas.rows, deltas.positions] = deltas.slots[0]
        token_rows = np.repeat(batch.row_ids, np.diff(batch.query_starts))
        self._check(batch, token_rows)
        slots = batch.out_slots[0]
        ids = np.where(batch.input_ids == -1, self.last_token[token_rows], batch.input_ids)
        self.tokens[slots], self.positions[slots] = ids, batch.positions
        tokens, failed = self._sample(batch, batch.sampling)
        return StepResult(
            tokens=tokens,
            failed=failed,
            logprobs=self._logprobs(batch, tokens),
            prompt_logprobs=self._prompt_logprobs(batch, token_rows),
        )

    def sequence(self, row: int, length: int) -> Int32Array:
        slots = self.table[row, :length]
        assert (self.positions[slots] == np.arange(length)).all(), "a slot was overwritten or never written"
        return self.tokens[slots]

    def _check(self, batch: Batch, token_rows: Int32Array) -> None:
        slots = batch.out_slots[0]
        assert np.diff(batch.query_starts).min() > 0
        assert len(set(batch.row_ids.tolist())) == batch.num_rows
        assert (batch.row_ids > 0).all(), "row 0 is padding"
        assert (batch.seq_lens == batch.positions[batch.query_starts[1:] - 1] + 1).all()
        assert (slots >= self.page_size).all(), "the padding page is never written"
        assert len(set(slots.tolist())) == len(slots)
        assert (self.table[token_rows, batch.positions] == slots).all()
        assert (slots % self.page_size == batch.positions % self.page_size).all()
        for array in (batch.input_ids, batch.positions, batch.query_starts, batch.seq_lens, batch.row_ids, slots):
            assert array.dtype == np.int32

    def _sample(self, batch: Batch, sampling: SamplingBatch | None) -> tuple[Int32Array, np.ndarray]:
        if sampling is None:
            assert len(batch.logits_at) == 0
            return np.empty(0, dtype=np.int32), np.empty(0, dtype=bool)
        for seed in sampling.penalty_seeds:
            self.prompt_ids[seed.row_id] = set(seed.prompt_ids.tolist())
            counts = zip(seed.output_ids.tolist(), seed.output_counts.tolist(), strict=True)
            self.output_counts[seed.row_id] = Counter(dict(counts))
        banned: dict[int, set[int]] = {}
        for index, token, value in zip(sampling.bias_index, sampling.bias_ids, sampling.bias_values, strict=True):
            if value == -np.inf:
                banned.setdefault(int(index), set()).add(int(token))
        at = np.searchsorted(batch.query_starts, batch.logits_at, side="right") - 1
        assert (batch.row_ids[at] == sampling.row_ids).all()
        assert (batch.positions[batch.logits_at] + 1 == sampling.positions).all()
        tokens = np.empty(len(at), dtype=np.int32)
        failed = np.zeros(len(at), dtype=bool)
        rows = zip(sampling.row_ids.tolist(), sampling.positions.tolist(), sampling.seeds.tolist(), strict=True)
        for i, (row, length, seed) in enumerate(rows):
            sequence = self.sequence(row, length)
            tokens[i] = next_token(sequence, seed)
            failed[i] = fails(sequence, seed, self.failure_rate)
            failed[i] |= len(banned.get(i, ())) >= VOCAB_SIZE
            while not failed[i] and int(tokens[i]) in banned.get(i, ()):
                tokens[i] = (tokens[i] + 1) % VOCAB_SIZE
            if sampling.frequency_penalty[i] != 0:
                self._count(row, sequence, int(tokens[i]))
        self.last_token[sampling.row_ids] = tokens
        return tokens, failed

    def _count(self, row: int, sequence: Int32Array, token: int) -> None:
        counts = self.output_counts[row]
        num_output = sum(counts.values())
        assert self.prompt_ids[row] == set(sequence[: len(sequence) - num_output].tolist())
        assert counts == Counter(sequence[len(sequence) - num_output :].tolist())
        counts[token] += 1

    @staticmethod
    def _logprobs(batch: Batch, tokens: Int32Array) -> tuple[TokenLogprobs | None, ...]:
        if batch.sampling is None or not batch.sampling.want_logprobs.any():
            return ()
        wanted = batch.sampling.want_logprobs
        return tuple(
            TokenLogprobs(logprob=-float(token)) if want else None
            for token, want in zip(tokens.tolist(), wanted.tolist(), strict=True)
        )

    def _prompt_logprobs(self, batch: Batch, token_rows: Int32Array) -> tuple[TokenLogprobs, ...]:
        wanted = batch.prompt_logprobs
        if wanted is None:
            return ()
        values = []
        for index, target in zip(wanted.token_index.tolist(), wanted.targets.tolist(), strict=True):
            prefix = self.sequence(int(token_rows[index]), int(batch.positions[index]) + 1)
            values.append(TokenLogprobs(logprob=prompt_logprob(prefix, target)))
        return tuple(values)
