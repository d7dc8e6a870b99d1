"""A device whose tokens are a hash of each row's whole sequence, read back through slots, table and positions.

A wrong slot, table entry, position or order of steps changes the tokens, or fails at once. What a request should get
is computed from its prompt alone by ``expected_tokens``.
"""

from __future__ import annotations

import zlib

import numpy as np

from cardan.scheduler import Request, SchedulerSettings
from cardan.types import Batch, FinishKind, Int32Array, StepResult, TokenLogprobs

VOCAB_SIZE = 97


def next_token(sequence: Int32Array, seed: int) -> int:
    """The token that follows a sequence."""
    return zlib.crc32(np.asarray(sequence, dtype=np.int32).tobytes(), seed & 0xFFFF) % VOCAB_SIZE


def prompt_logprob(prefix: Int32Array, target: int) -> float:
    """The made-up logprob of a token after a prefix."""
    return -float(zlib.crc32(np.append(prefix, target).astype(np.int32).tobytes()) % 10_000) / 100


def expected_tokens(request: Request) -> tuple[list[int], FinishKind, int]:
    """Tokens of a request that runs alone, why it ends, and how many there are."""
    sequence = list(request.prompt.tolist())
    output: list[int] = []
    while len(output) < request.max_new_tokens:
        token = next_token(np.asarray(sequence), request.seed)
        banned = request.stop_ids if len(output) < request.params.min_new_tokens else frozenset()
        while token in banned:
            token = (token + 1) % VOCAB_SIZE
        sequence.append(token)
        output.append(token)
        if request.calls_checker and request.stop is not None and request.stop.check(output, 1) is not None:
            return output, FinishKind.STOP, len(output)
        if token in request.stop_ids and len(output) > request.params.min_new_tokens:
            return output, FinishKind.STOP, len(output)
    return output, FinishKind.LENGTH, len(output)


class FakeDevice:
    """Runs batches in order, at once; keeps which slots a step writes so that tests can see what is in flight."""

    def __init__(self, settings: SchedulerSettings) -> None:
        size = settings.num_slots + settings.page_size
        self.tokens = np.full(size, -7, dtype=np.int32)
        self.positions = np.full(size, -7, dtype=np.int32)
        self.table = np.zeros((settings.num_rows, settings.context_length), dtype=np.int32)
        self.last_token = np.full(settings.num_rows, -7, dtype=np.int32)
        self.page_size = settings.page_size

    def launch(self, batch: Batch) -> StepResult:
        deltas = batch.table_deltas
        self.table[deltas.rows, deltas.positions] = deltas.slots[0]
        counts = np.diff(batch.query_starts)
        token_rows = np.repeat(batch.row_ids, counts)
        assert counts.min() > 0
        assert len(set(batch.row_ids.tolist())) == batch.num_rows
        assert (batch.seq_lens == batch.positions[batch.query_starts[1:] - 1] + 1).all()
        slots = batch.out_slots[0]
        assert (slots >= self.page_size).all(), "the padding page is never written"
        assert len(np.unique(slots)) == len(slots)
        assert (self.table[token_rows, batch.positions] == slots).all()
        assert (slots % self.page_size == batch.positions % self.page_size).all()
        ids = np.where(batch.input_ids == -1, self.last_token[token_rows], batch.input_ids)
        self.tokens[slots], self.positions[slots] = ids, batch.positions
        tokens = self._sample(batch)
        return StepResult(
            tokens=tokens,
            failed=np.zeros(tokens.shape[0], dtype=bool),
            logprobs=self._logprobs(batch, tokens),
            prompt_logprobs=self._prompt_logprobs(batch, token_rows),
        )

    def sequence(self, row: int, length: int) -> Int32Array:
        slots = self.table[row, :length]
        assert (self.positions[slots] == np.arange(length)).all(), "a slot was overwritten or never written"
        return self.tokens[slots]

    def _sample(self, batch: Batch) -> Int32Array:
        sampling = batch.sampling
        if sampling is None:
            return np.empty(0, dtype=np.int32)
        banned: dict[int, set[int]] = {}
        for index, token, value in zip(sampling.bias_index, sampling.bias_ids, sampling.bias_values, strict=True):
            if value == -np.inf:
                banned.setdefault(int(index), set()).add(int(token))
        at = np.searchsorted(batch.query_starts, batch.logits_at, side="right") - 1
        assert (batch.row_ids[at] == sampling.row_ids).all()
        assert (batch.positions[batch.logits_at] + 1 == sampling.positions).all()
        tokens = np.empty(len(at), dtype=np.int32)
        for i, (row, length, seed) in enumerate(
            zip(sampling.row_ids.tolist(), sampling.positions.tolist(), sampling.seeds.tolist(), strict=True)
        ):
            token = next_token(self.sequence(row, length), seed)
            while token in banned.get(i, ()):
                token = (token + 1) % VOCAB_SIZE
            tokens[i] = token
        self.last_token[sampling.row_ids] = tokens
        return tokens

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
