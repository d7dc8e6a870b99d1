"""What the engine takes and gives: requests, outputs, and what a server needs to know of it.

It knows neither HTTP nor how the processes talk.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from cardan.text.tokenizer import Tokenizer
from cardan.types import FinishReason, Float32Array, LogprobParams, Pooling, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt. Exactly one of ``text``, ``input_ids`` and ``input_embeds`` is given.

    Attributes:
        text: the prompt as text.
        input_ids: the prompt as token ids.
        input_embeds: the prompt as vectors, float32 ``[tokens, hidden]``: what the embedding layer would give. No other
            request shares its KV.
        hidden_states: asks for the hidden states, after the final norm, of the prompt and of all output tokens but the
            last.
        sampling: how tokens are chosen; ``n`` choices are generated.
        logprobs: which logprobs are wanted.
        rid: the caller's id, or None for a fresh one. It must be unique among open requests.
        priority: higher runs first, with priority scheduling.
        cache_salt: requests share cached prefixes only with those of the same salt.
        routing_key: for the ``routing-key`` policy.
        pooling: asks for the hidden state that stands for the prompt; ``max_new_tokens`` is 0 then.
        add_special_tokens: whether the tokenizer adds its own (false when a chat template already did).
        processor: name of an installed logit processor, and its parameters as JSON.
        forced_output_ids: the first output tokens, whatever the model says, for teacher forcing: every step is run as
            if they had been sampled, and logprobs are the model's own. Sampling must be greedy then.
    """

    text: str | None = None
    input_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: LogprobParams = field(default_factory=LogprobParams)
    rid: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    routing_key: str | None = None
    pooling: Pooling | None = None
    input_embeds: Float32Array | None = field(default=None, compare=False)
    hidden_states: bool = False
    add_special_tokens: bool = True
    forced_output_ids: tuple[int, ...] = ()
    processor: tuple[str, str] | None = None


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Seconds that a request spent, all measured from its arrival but for ``queue_s``.

    Attributes:
        queue_s: waiting before its first prefill pass.
        first_token_s: until the first token, or None before it.
        e2e_s: until this output.
    """

    queue_s: float = 0.0
    first_token_s: float | None = None
    e2e_s: float = 0.0


class GenerateOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """News of one choice of a request: what was added since the last output, and totals.

    One is made for each token of every request, which is why this is a struct: it costs a tenth of a dataclass.

    Attributes:
        rid: the request.
        index: which of its ``n`` choices.
        text: text added.
        token_ids: tokens added (the dropped stop token is included, its text is not).
        logprobs: one per added token, when asked for.
        prompt_logprobs: with the first output of a choice, when asked for: one per prompt position from
            ``prompt_start`` on; position 0 has none.
        prompt_token_ids: the ids that ``prompt_logprobs`` belong to.
        embedding: with the end, when asked for: the hidden state that stands for the prompt, not normalized.
        hidden_states: when asked for, those of tokens computed since the last output, each as the bytes of its float32
            values: first those of the prompt, then one with each output token but the first.
        finish_reason: None while it goes on.
        prompt_tokens: length of the prompt.
        completion_tokens: output tokens so far.
        cached_tokens: prompt tokens that came from the prefix cache.
        num_retractions: how often the request lost its KV and was prefilled again.
        max_new_tokens_clamped: the limit that applied, when the pool forced a lower one than was asked for.
        truncated_from: length of the prompt before it was cut (``--allow-auto-truncate``), or None.
        times: see ``RequestTimes``.
    """

    rid: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    embedding: tuple[float, ...] = ()
    hidden_states: tuple[bytes, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_retractions: int = 0
    max_new_tokens_clamped: int | None = None
    truncated_from: int | None = None
    times: RequestTimes = RequestTimes()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine serves, once it is ready.

    Attributes:
        model_name: the name that requests use.
        model_path: where the weights came from.
        vocab_size: of the model.
        context_length: longest sequence.
        max_input_tokens: longest prompt that is admitted.
        max_total_tokens: slots of the KV pool.
        plan: the plan as plain JSON values, as ``/server_info`` shows it.
        version: of Cardan.
        started_s: how long the start took, in seconds, by part.
        sampling_defaults: fields of ``SamplingParams`` and the model's values for requests that do not state them.
            Whoever builds ``SamplingParams`` from a request applies them; the engine takes those as they are.
        grammar_backend: what compiles grammars, or ``none``.
        hidden_size: width of the model's vectors.
    """

    model_name: str
    model_path: str
    vocab_size: int
    context_length: int
    max_input_tokens: int
    max_total_tokens: int
    plan: Mapping[str, Any]
    version: str
    started_s: Mapping[str, float] = field(default_factory=dict)
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    grammar_backend: str = "none"
    hidden_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges and running totals of an engine, as of now.

    Attributes:
        num_running: rows in the running set.
        num_queued: requests that wait.
        num_grammar_queued: those of them that wait for their grammar.
        used_tokens: slots that are held by running rows or locked prefixes.
        cached_tokens: evictable slots in the tree.
        max_total_tokens: slots of the pool.
        totals: counters since the start: ``prompt_tokens``, ``cached_prompt_tokens``, ``generated_tokens``,
            ``requests``, ``aborted_requests``, ``failed_requests``, ``retractions``, ``prefill_batches``,
            ``decode_steps``, ``evicted_tokens``, ``graph_replays`` (where steps are captured), and
            ``fallback:<reason>`` for each kind.
        gen_throughput: output tokens per second over the last interval.
    """

    num_running: int = 0
    num_queued: int = 0
    num_grammar_queued: int = 0
    used_tokens: int = 0
    cached_tokens: int = 0
    max_total_tokens: int = 0
    totals: Mapping[str, int] = field(default_factory=dict)
    gen_throughput: float = 0.0


class AsyncEngine(Protocol):
    """The engine as the server and the CLI use it; ``cardan.engine.Frontend`` implements it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def info(self) -> EngineInfo:
        """What is served."""

    @property
    def alive(self) -> bool:
        """Whether all processes run."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        """Run one request; closing the generator aborts it. News that are not taken in time come joined.

        Raises (at the first ``anext``):
            RequestError: the request is wrong (prompt too long, ids out of range, duplicate rid …).
            QueueFullError: too many requests wait.
            EngineDeadError: a process of the engine ended.
        """

    async def abort(self, rid: str | None) -> None:
        """Abort one request, or all for None. An unknown id is ignored."""

    async def flush_cache(self) -> bool:
        """Empty the prefix cache. Returns False when requests were running, and then nothing was done.

        Raises:
            EngineBusyError: no answer came in time; the cache may still be emptied later.
            EngineDeadError: a process of the engine ended.
        """

    async def start_profile(self, num_steps: int | None = None) -> None:
        """Record what the scheduler's steps do, for ``num_steps`` or until ``stop_profile``.

        Raises:
            RequestError: the engine was started without a folder for it, or records already.
            EngineBusyError: no answer came in time.
            EngineDeadError: a process of the engine ended.
        """

    async def stop_profile(self) -> str:
        """End the recording and write it. Returns the file.

        Raises:
            RequestError: there is no recording, or it could not be written.
            EngineBusyError: no answer came in time; the file may still come.
            EngineDeadError: a process of the engine ended.
        """

    async def stats(self) -> EngineStats:
        """Gauges and totals as of now.

        Raises:
            EngineBusyError: no answer came in time.
            EngineDeadError: a process of the engine ended.
        """
