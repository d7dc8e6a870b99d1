"""What is known of each running row, as arrays indexed by row id, so that a step works on slices.

It decides nothing: planning and committing read and write it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cardan.scheduler.request import Request
from cardan.types import BoolArray, Int32Array


class RowArrays:
    """One entry per row; row 0 is padding.

    Attributes:
        requests: who has the row.
        alive: bool, the row's request runs; false also for a row that only waits for its last step to be read.
        seq_len: int32, tokens that have a slot, those of steps in flight included.
        safe_len: int32, tokens whose KV a committed step computed.
        prefix_len: int32, leading tokens whose slots the cache holds; the row owns the others.
        generated: int32, tokens committed.
        pending: int32, tokens sampled in steps in flight.
        max_new: int32, most tokens it may generate.
        min_new: int32, tokens before which it must not stop.
        num_prompt: int32, length of the prompt.
        last_token: int32, the last committed token.
        full_reserve: bool, admission reserves all of its output (``ignore_eos``).
        maybe_stop: bool ``[vocab]``, ids that ended or could end a request at some time; others end none.
        care_from: int32, tokens from which on each one is looked at alone: the most it may generate, or 0 where its
            stops need a call, or it wants logprobs.
        has_bias: bool, it has a logit bias or a least length.
        has_ids: bool, it wants logprobs of ids it names.
        held: bool, it waits for its step in flight to be read, since forced tokens follow what that samples.
        forced: for rows with committed tokens that no step has computed beside the newest one: how many.
        version: grows whenever anything but a decode step of all running rows moves a row on, or makes it wait.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.requests: list[Request | None] = [None] * num_rows

        def zeros(dtype: Any) -> npt.NDArray[Any]:
            return np.zeros(num_rows, dtype=dtype)

        self.alive = zeros(bool)
        self.seq_len = zeros(np.int32)
        self.safe_len = zeros(np.int32)
        self.prefix_len = zeros(np.int32)
        self.generated = zeros(np.int32)
        self.pending = zeros(np.int32)
        self.max_new = zeros(np.int32)
        self.min_new = zeros(np.int32)
        self.num_prompt = zeros(np.int32)
        self.last_token = zeros(np.int32)
        self.full_reserve = zeros(bool)
        self.care_from = zeros(np.int32)
        self.has_bias = zeros(bool)
        self.has_ids = zeros(bool)
        self.has_mask = zeros(bool)
        self.held = zeros(bool)
        self.forced: dict[int, int] = {}
        self.version = 0
        self.num_hidden = 0
        self.want_logprobs = zeros(bool)
        self.top_logprobs = zeros(np.int32)
        self.temperature = zeros(np.float32)
        self.top_k = zeros(np.int32)
        self.top_p = zeros(np.float32)
        self.min_p = zeros(np.float32)
        self.seeds = zeros(np.uint64)
        self.frequency_penalty = zeros(np.float32)
        self.presence_penalty = zeros(np.float32)
        self.repetition_penalty = zeros(np.float32)
        self.maybe_stop: BoolArray = np.zeros(vocab_size, dtype=bool)

    def assign(self, row: int, request: Request) -> None:
        """Give a row to a request; it has no KV yet."""
        self.requests[row] = request
        self.alive[row] = True
        self.seq_len[row] = self.safe_len[row] = self.prefix_len[row] = 0
        self.generated[row] = len(request.output_ids)
        self.pending[row] = 0
        self.held[row] = False
        self.max_new[row] = request.max_new_tokens
        self.num_prompt[row] = request.num_prompt
        self._assign_stops(row, request)
        self._assign_sampling(row, request)

    def release(self, row: int) -> None:
        """The row's request runs no more."""
        self.alive[row] = False
        owner = self.requests[row]
        self.num_hidden -= owner is not None and owner.hidden_states
        self.forced.pop(row, None)

    def jump(self, row: int, tokens: list[int]) -> None:
        """Tokens were added behind a row's newest one, without being sampled."""
        self.generated[row] += len(tokens)
        self.last_token[row] = tokens[-1]
        self.forced[row] = self.forced.get(row, 0) + len(tokens)
        self.version += 1

    def hold(self, row: int, held: bool) -> None:
        """Make a row wait for its step in flight to be read, or let it go on."""
        self.held[row] = held
        self.version += 1

    def tokens_to_compute(self, rows: npt.NDArray[np.intp]) -> Int32Array:
        """Tokens of each row that the next step computes: the newest one, and those forced before it, int32."""
        counts = np.ones(rows.shape[0], dtype=np.int32)
        if self.forced:
            counts += np.asarray([self.forced.get(row, 0) for row in rows.tolist()], dtype=np.int32)
        return counts

    def _assign_stops(self, row: int, request: Request) -> None:
        params = request.params
        self.min_new[row] = params.min_new_tokens
        self.full_reserve[row] = params.ignore_eos
        careful = request.calls_checker or request.logprobs.output or request.needs_grammar or request.hidden_states
        self.num_hidden += request.hidden_states
        self.care_from[row] = 0 if careful else request.max_new_tokens
        self.maybe_stop[[token for token in request.stop_ids if 0 <= token < self._vocab_size]] = True

    def _assign_sampling(self, row: int, request: Request) -> None:
        params, logprobs = request.params, request.logprobs
        self.temperature[row] = params.temperature
        self.top_k[row] = self._vocab_size if params.top_k < 1 else min(params.top_k, self._vocab_size)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seeds[row] = request.seed
        self.frequency_penalty[row] = params.frequency_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.repetition_penalty[row] = params.repetition_penalty
        self.want_logprobs[row] = logprobs.output
        self.top_logprobs[row] = logprobs.top if logprobs.output else 0
        self.has_ids[row] = logprobs.output and bool(logprobs.token_ids)
        self.has_bias[row] = bool(params.logit_bias) or params.min_new_tokens > len(request.output_ids)
        self.has_mask[row] = request.needs_grammar
