"""A request, the one mutable object of the scheduler.

It knows no text: where a stop needs text, its ``StopChecker`` does. Only the scheduler changes it.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from cardan.cache import NodeHandle
from cardan.types import (
    FinishReason,
    Float32Array,
    Float64Array,
    Int32Array,
    LogprobParams,
    Pooling,
    SamplingParams,
    TokenLogprobs,
)


class StopChecker(Protocol):
    """Decides whether a request ends, for the stops that need text."""

    def check(self, output_ids: list[int], new_count: int) -> FinishReason | None:
        """Look at the output after ``new_count`` more tokens; None lets it go on.

        The scheduler calls it only for requests with stop strings or stop regexes; token ids, EOS, length and the
        grammar it checks itself, after this.
        """


class Grammar(Protocol):
    """What one request's output must match. It is told every output token once, in order."""

    @property
    def forced(self) -> Sequence[int]:
        """Tokens that come next, whatever the model says; masks allow nothing else."""

    @property
    def complete(self) -> bool:
        """Whether the output matches and nothing can follow."""

    @property
    def error(self) -> str | None:
        """Why it can go no further, or None."""

    @property
    def at_limit(self) -> bool:
        """Whether ``error`` is a limit of the grammar's own, which a simpler one would not run into."""

    def accept(self, token: int) -> bool:
        """Take the next token. Returns False, with ``error`` set, when the grammar does not allow it."""


class RequestState(enum.Enum):
    """Where a request is."""

    NEW = "new"
    GRAMMAR = "grammar"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt and what became of it. The first block is the caller's, the rest is the scheduler's.

    Attributes:
        rid: unique among open requests.
        prompt_ids: the prompt; becomes an int32 array.
        params: how tokens are chosen.
        logprobs: which logprobs are wanted.
        stop: needed with stop strings or stop regexes.
        priority: higher runs first, with priority scheduling.
        cache_salt: prefixes are shared only with requests of the same salt.
        routing_key: for the ``routing-key`` policy.
        arrival_s: when it arrived, on the clock of ``plan``.
        eos_ids: ids that end it unless ``params.ignore_eos``.
        needs_grammar: it waits for ``Scheduler.grammar_ready``, and its rows wait for a mask.
        truncated_from: length of the prompt before it was cut, by the caller or here, or None.
        pooling: which hidden states stand for its prompt; it then wants no token. None where it wants no such.
        hidden_states: it wants the hidden state of every token that a step computes.
        embeds: float32 ``[prompt, hidden]``, its prompt as vectors; ``prompt_ids`` then only say how many. Its KV is
            shared with no one.
        processor: says before each token what is added to which logits; the scheduler never calls it.
        forced_output_ids: its first output tokens, whatever the model says; logprobs stay the model's own, and no
            token id among them ends it.

        state: where it is.
        order: number of its arrival.
        row: row of the tables while it runs, else 0.
        node: end of the cached prefix it has locked.
        output_ids: tokens so far, the stop token included.
        max_new_tokens: the limit that applies.
        max_new_tokens_clamped: the same, when it is lower than what was asked for.
        seed: key of its sampling noise.
        cached_tokens: prompt tokens that came from the cache when it was first admitted.
        prefill_start: tokens that came from the cache when it was last admitted.
        computed_from: first position whose KV it has computed itself, whenever it was admitted.
        num_retractions: how often it lost its KV.
        deferrals: passes it waited for another request with the same prefix.
        first_run_s: time of its first prefill pass.
        prompt_logprobs: logprobs of prompt tokens so far, from ``logprobs.prompt_start`` on.
        pool_planned: prompt tokens whose hidden states are summed by steps that were planned.
        pooled: sum of hidden states so far.
        hidden_planned: tokens whose hidden states are given by steps that were planned.
        hidden: hidden states that were not handed out yet, float32 ``[n, hidden]`` each.
        finish_reason: why it ended.
        grammar: what its output must match, once that is compiled.
    """

    rid: str
    prompt_ids: Sequence[int] | Int32Array
    params: SamplingParams = field(default_factory=SamplingParams)
    logprobs: LogprobParams = field(default_factory=LogprobParams)
    stop: StopChecker | None = None
    priority: int = 0
    cache_salt: str | None = None
    routing_key: str | None = None
    arrival_s: float = 0.0
    eos_ids: frozenset[int] = frozenset()
    needs_grammar: bool = False
    truncated_from: int | None = None
    pooling: Pooling | None = None
    hidden_states: bool = False
    embeds: Float32Array | None = None
    processor: Callable[[Sequence[int], Sequence[int]], Mapping[int, float]] | None = None
    forced_output_ids: tuple[int, ...] = ()

    state: RequestState = field(default=RequestState.NEW, init=False)
    order: int = field(default=0, init=False)
    row: int = field(default=0, init=False)
    node: NodeHandle = field(default=None, init=False)
    output_ids: list[int] = field(default_factory=list, init=False)
    max_new_tokens: int = field(default=0, init=False)
    max_new_tokens_clamped: int | None = field(default=None, init=False)
    seed: int = field(default=0, init=False)
    cached_tokens: int = field(default=0, init=False)
    prefill_start: int = field(default=0, init=False)
    computed_from: int = field(default=sys.maxsize, init=False)
    num_retractions: int = field(default=0, init=False)
    deferrals: int = field(default=0, init=False)
    first_run_s: float | None = field(default=None, init=False)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list, init=False)
    pool_planned: int = field(default=0, init=False)
    pooled: Float64Array | None = field(default=None, init=False)
    hidden_planned: int = field(default=0, init=False)
    hidden: list[Float32Array] = field(default_factory=list, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    grammar: Grammar | None = field(default=None, init=False)
    prompt: Int32Array = field(init=False)
    _sequence: Int32Array = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = np.asarray(self.prompt_ids, dtype=np.int32)
        self._sequence = self.prompt
        least = len(self.forced_output_ids)
        if self.params.min_new_tokens < least:
            self.params = replace(self.params, min_new_tokens=least)
        if self.logprobs.prompt_start == 0:
            self.prompt_logprobs.append(None)

    @property
    def num_prompt(self) -> int:
        """Length of the prompt."""
        return int(self.prompt.shape[0])

    @property
    def num_remaining(self) -> int:
        """Tokens it may still generate."""
        return self.max_new_tokens - len(self.output_ids)

    @property
    def calls_checker(self) -> bool:
        """Whether its stops need more than token ids and a length."""
        return self.stop is not None and bool(self.params.stop or self.params.stop_regex)

    @property
    def may_jump(self) -> bool:
        """Whether tokens that its grammar forces may go without a step of their own: no one wants what that gives."""
        wanted = self.logprobs.output or self.hidden_states or self.processor is not None
        return self.grammar is not None and not wanted

    @property
    def has_penalty(self) -> bool:
        """Whether it penalizes repeated tokens."""
        params = self.params
        return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end it: those it names, and EOS unless that is ignored."""
        named = frozenset(self.params.stop_token_ids)
        return named if self.params.ignore_eos else named | self.eos_ids

    @property
    def next_prompt_logprob(self) -> int | None:
        """Position of the next prompt token whose logprob is wanted and not there yet, or None."""
        start = self.logprobs.prompt_start
        if start is None:
            return None
        position = max(start + len(self.prompt_logprobs), 1)
        return position if position < self.num_prompt else None

    def embedding(self) -> tuple[float, ...]:
        """The hidden state that stands for its prompt; empty where it wanted none, or the device gave none."""
        if self.pooled is None:
            return ()
        total = self.num_prompt if self.pooling is Pooling.MEAN else 1
        return tuple((self.pooled / total).tolist())

    def take_hidden(self) -> tuple[bytes, ...]:
        """Hidden states since the last call, each as the bytes of its float32 values, in the order of the tokens."""
        states, self.hidden = self.hidden, []
        return tuple(row.tobytes() for block in states for row in block)

    def sequence(self) -> Int32Array:
        """Prompt and output so far, int32."""
        have = self._sequence.shape[0] - self.prompt.shape[0]
        if have != len(self.output_ids):
            self._sequence = np.concatenate((self._sequence, np.asarray(self.output_ids[have:], dtype=np.int32)))
        return self._sequence

    def match_limit(self) -> int:
        """Most tokens that may come from the cache.

        The last one's logits are needed, and those of prompt logprobs; a mean needs the hidden states of all, and so
        does who wants them each. Of a prompt of vectors nothing is cached.
        """
        limit = self.num_prompt + len(self.output_ids) - 1
        if self.embeds is not None:
            return 0
        if self.hidden_states:
            limit = min(limit, self.hidden_planned)
        if self.pooling is Pooling.MEAN:
            limit = min(limit, self.pool_planned)
        wanted = self.next_prompt_logprob
        return limit if wanted is None else min(limit, wanted - 1)

    def cut_prompt(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` of the prompt."""
        self.truncated_from = self.truncated_from or self.num_prompt
        self.prompt = self.prompt[:num_tokens]
        self._sequence = self.prompt
        if self.embeds is not None:
            self.embeds = self.embeds[:num_tokens]
