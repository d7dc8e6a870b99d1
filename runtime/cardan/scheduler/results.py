"""Does the bookkeeping of a step that was read: tokens, stops, logprobs, and what is given back.

It does not know what runs next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cardan.scheduler.allowed import SampledWith
from cardan.scheduler.outputs import OutputBatch
from cardan.scheduler.request import Grammar, Request, RequestState
from cardan.scheduler.running import ONE, RowIndex
from cardan.scheduler.state import Scheduled, State, output_of
from cardan.types import BoolArray, FinishKind, FinishReason, Int32Array, StepResult, TokenLogprobs


@dataclass(slots=True)
class _Reading:
    """One step as it is being read."""

    scheduled: Scheduled
    result: StepResult
    outputs: OutputBatch
    sampled: SampledWith | None

    def logprobs_of(self, index: int) -> TokenLogprobs | None:
        return self.result.logprobs[index] if self.result.logprobs else None


LEAST_JUMP = 3
"""Forced tokens for which a row leaves out a step: fewer are sampled just as soon."""


GRAMMAR_LIMIT = "grammar_limit"
"""Code of requests that end because their grammar ran into a limit of its own."""

NOTHING_ALLOWED = "no_token_allowed"
"""Code of requests that end because they forbid every token."""


class Committer:
    """Commits steps in the order they were planned."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._vocab_size = state.settings.vocab_size
        self._vocab_limit = np.array(self._vocab_size, dtype=np.uint32)

    def commit(self, scheduled: Scheduled, result: StepResult, sampled: SampledWith | None = None) -> OutputBatch:
        """Take a step's tokens in. Rows that ended meanwhile drop theirs; retracted requests keep theirs.

        Args:
            scheduled: the step.
            result: what it gave.
            sampled: what its rows sampled with, where that is more than was planned.
        """
        state = self._state
        oldest = state.in_flight.popleft()
        assert oldest is scheduled, "steps are committed in the order they were planned"
        everyone = scheduled.batch.row_ids if scheduled.extends else scheduled.rows
        state.memory.arrays.safe_len[everyone] = scheduled.batch.seq_lens
        reading = _Reading(scheduled, result, OutputBatch(), sampled)
        self._take_prompt_logprobs(reading)
        self._take_pooled(reading)
        self._take_hidden(reading)
        if scheduled.rows.shape[0]:
            self._take_tokens(reading)
        self._end_unsampled(reading)
        if state.memory.end_step():
            state.head_blocked = False
        return reading.outputs

    # --- tokens ---

    def _take_tokens(self, reading: _Reading) -> None:
        state, scheduled = self._state, reading.scheduled
        arrays, rows = state.memory.arrays, scheduled.rows
        tokens = np.asarray(reading.result.tokens, dtype=np.int32)
        arrays.pending[rows] = arrays.pending[rows] - ONE
        bad = tokens.view(np.uint32) >= self._vocab_limit
        bad |= reading.result.failed
        alive = arrays.alive[rows]
        good = alive & ~bad
        if np.count_nonzero(good) == rows.shape[0]:
            ids = tokens.tolist()
            care = self._append(scheduled.requests, rows, tokens, ids)
            if not np.count_nonzero(care):
                reading.outputs.rids.extend(scheduled.rids)
                reading.outputs.token_ids.extend(ids)
                return
        else:
            chosen = np.flatnonzero(good)
            requests = [scheduled.requests[i] for i in chosen.tolist()]
            care = ~good
            care[chosen] = self._append(requests, rows[chosen], tokens[chosen], tokens[chosen].tolist())
        self._hand_out(reading, np.flatnonzero(~care), tokens)
        for i in np.flatnonzero(care).tolist():
            self._take_with_care(reading, i, int(tokens[i]), bool(bad[i]), bool(alive[i]))

    def _append(self, requests: list[Request], rows: RowIndex, tokens: Int32Array, ids: list[int]) -> BoolArray:
        """Add a token, given twice, to each row. Returns which may end with it, or whose news is more than it."""
        for request, token in zip(requests, ids, strict=True):
            request.output_ids.append(token)
        arrays = self._state.memory.arrays
        generated = arrays.generated[rows] + ONE
        arrays.generated[rows] = generated
        arrays.last_token[rows] = tokens
        self._state.totals["generated_tokens"] += len(ids)
        care: BoolArray = generated >= arrays.care_from[rows]
        care |= generated == ONE
        care |= arrays.maybe_stop[tokens]
        return care

    @staticmethod
    def _hand_out(reading: _Reading, chosen: RowIndex, tokens: Int32Array) -> None:
        outputs, rids = reading.outputs, reading.scheduled.rids
        outputs.rids.extend([rids[i] for i in chosen.tolist()])
        outputs.token_ids.extend(tokens[chosen].tolist())

    def _take_with_care(self, reading: _Reading, index: int, token: int, bad: bool, alive: bool) -> None:
        """One row: it may end, have logprobs, be retracted, or have ended before."""
        request = reading.scheduled.requests[index]
        if request.state is RequestState.FINISHED:
            self._state.totals["dropped_tokens"] += 1
            return
        if bad:
            self._finish(reading, request, self._failure(reading, request, index, token))
            return
        if not alive:
            request.output_ids.append(token)
            self._state.waiting.note_token()
            self._state.totals["generated_tokens"] += 1
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        if len(request.output_ids) == 1:
            prompt_logprobs = tuple(request.prompt_logprobs)
        logprobs = (reading.logprobs_of(index),) if request.logprobs.output else ()
        tokens = [token]
        reason = self._judge(request, token)
        if reason is None and request.may_jump and self._state.settings.jump_forward:
            forced, reason = self._jump(request)
            tokens += forced
        if reason is not None:
            self._state.finish(request, reason)
        reading.outputs.detailed.append(output_of(request, tuple(tokens), logprobs, prompt_logprobs))

    @staticmethod
    def _judge(request: Request, token: int) -> FinishReason | None:
        """Whether a request ends with its newest token, by its grammar as well."""
        grammar = request.grammar
        if grammar is not None and not grammar.accept(token):
            return _broken_grammar(request, token)
        reason = finish_reason(request, token)
        if reason is None and grammar is not None and grammar.complete:
            return FinishReason(FinishKind.STOP)
        return reason

    def _jump(self, request: Request) -> tuple[list[int], FinishReason | None]:
        """Add the tokens that the grammar forces, unless a step in flight samples the first of them.

        Returns:
            Tokens added, and why the request ends, or None.
        """
        state, row, grammar = self._state, request.row, request.grammar
        assert grammar is not None
        arrays = state.memory.arrays
        if row and arrays.pending[row]:
            arrays.hold(row, len(grammar.forced) >= LEAST_JUMP)
            return [], None
        if arrays.held[row]:
            arrays.hold(row, False)
        added: list[int] = []
        reason: FinishReason | None = None
        while reason is None and grammar.forced:
            token = grammar.forced[0]
            request.output_ids.append(token)
            added.append(token)
            reason = self._judge(request, token)
        state.totals["generated_tokens"] += len(added)
        state.totals["jumped_tokens"] += len(added)
        if added and row:
            arrays.jump(row, added)
        elif added:
            state.waiting.note_token(len(added))
        return added, reason

    def _failure(self, reading: _Reading, request: Request, index: int, token: int) -> FinishReason:
        """Why a row has no token. Where the request left it one, the device is at fault."""
        grammar, vocab_size = request.grammar, self._vocab_size
        if not reading.result.failed[index]:
            message = f"The device gave token {token}, but the vocabulary has {vocab_size}; the request was ended."
            return FinishReason(FinishKind.ERROR, message=message)
        if grammar is not None and grammar.at_limit:
            return _at_limit(grammar)
        if grammar is not None and grammar.error:
            message = f"The grammar allows no token, so the request was ended: {grammar.error}"
            return FinishReason(FinishKind.ERROR, message=message)
        planned = reading.scheduled.batch.sampling
        assert planned is not None, "a row that gave no token was to give one"
        if not (reading.sampled or SampledWith(planned)).allows_any(index, vocab_size):
            message = (
                "What the request forbids by logit_bias, min_new_tokens, a grammar and a logit processor together "
                "leaves no token, so it was ended. Forbid less."
            )
            return FinishReason(FinishKind.ERROR, message=message, code=NOTHING_ALLOWED)
        message = "The model's logits held NaN or allowed no token, so the request was ended."
        return FinishReason(FinishKind.ERROR, message=message)

    def _finish(self, reading: _Reading, request: Request, reason: FinishReason) -> None:
        self._state.finish(request, reason, keep=False)
        reading.outputs.detailed.append(output_of(request))

    # --- prompts ---

    def _take_prompt_logprobs(self, reading: _Reading) -> None:
        values = reading.result.prompt_logprobs
        offset = 0
        for extend, count in zip(reading.scheduled.extends, reading.scheduled.prompt_logprob_counts, strict=True):
            if count:
                extend.request.prompt_logprobs.extend(values[offset : offset + count])
                offset += count

    @staticmethod
    def _take_pooled(reading: _Reading) -> None:
        sums = reading.result.pooled
        if sums is None:
            return
        for request, total in zip(reading.scheduled.pooled, sums, strict=True):
            request.pooled = total if request.pooled is None else request.pooled + total

    @staticmethod
    def _take_hidden(reading: _Reading) -> None:
        states = reading.result.hidden
        if states is None:
            return
        offset = 0
        for request, count in reading.scheduled.hidden:
            if request.state is not RequestState.FINISHED:
                request.hidden.append(states[offset : offset + count])
            offset += count

    def _end_unsampled(self, reading: _Reading) -> None:
        """Requests that wanted no token end with their prompt."""
        for extend in reading.scheduled.extends:
            request = extend.request
            if extend.final and not extend.samples and request.state is not RequestState.FINISHED:
                self._state.finish(request, _end_of_prompt(request))
                logprobs = tuple(request.prompt_logprobs)
                reading.outputs.detailed.append(output_of(request, prompt_logprobs=logprobs))


def _end_of_prompt(request: Request) -> FinishReason:
    if request.pooling is not None and request.pooled is None:
        message = "The platform gives no hidden states, so there is no embedding. Serve the model on another one."
        return FinishReason(FinishKind.ERROR, message=message)
    return FinishReason(FinishKind.LENGTH, length=0)


def finish_reason(request: Request, token: int) -> FinishReason | None:
    """Whether a request ends with its newest token: stop strings and regexes, token ids and EOS, then length."""
    count = len(request.output_ids)
    if request.calls_checker and request.stop is not None:
        reason = request.stop.check(request.output_ids, 1)
        if reason is not None:
            return reason
    if count > request.params.min_new_tokens and token in request.stop_ids:
        return FinishReason(FinishKind.STOP, matched=token)
    if count >= request.max_new_tokens:
        return FinishReason(FinishKind.LENGTH, length=count)
    return None


def _broken_grammar(request: Request, token: int) -> FinishReason:
    grammar = request.grammar
    assert grammar is not None
    if grammar.at_limit:
        return _at_limit(grammar)
    message = f"The grammar does not go on with token {token}, so the request was ended: {grammar.error}"
    return FinishReason(FinishKind.ERROR, message=message)


def _at_limit(grammar: Grammar) -> FinishReason:
    message = f"The grammar ran into a limit, so the request was ended: {grammar.error}"
    return FinishReason(FinishKind.ERROR, message=message, code=GRAMMAR_LIMIT)
