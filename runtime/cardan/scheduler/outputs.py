"""What the scheduler hands out: news of requests, and gauges.

It knows no text and no process; a batch of news is columnar, because most rows have one plain token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cardan.types import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """News of one request: what was added since the last news, and totals.

    Attributes:
        rid: the request.
        new_token_ids: tokens added, the stop token included.
        logprobs: one per added token when asked for, else empty.
        prompt_logprobs: with the first token, when asked for: one per prompt position from ``prompt_start`` on;
            position 0 has none.
        finish_reason: None while it goes on.
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: prompt tokens that came from the cache.
        num_retractions: how often it lost its KV and was prefilled again.
        max_new_tokens_clamped: the limit that applies, when the pool or the context forced a lower one.
        truncated_from: length of the prompt before it was cut, or None.
        embedding: with the end, when asked for: the hidden state that stands for the prompt.
        hidden: when asked for, hidden states of tokens computed since the last news, as the bytes of float32 values:
            with the first token those of the prompt, with each later one that of the token before it.
        queue_s: seconds from arrival to the first prefill pass.
    """

    rid: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_retractions: int = 0
    max_new_tokens_clamped: int | None = None
    truncated_from: int | None = None
    embedding: tuple[float, ...] = ()
    hidden: tuple[bytes, ...] = ()
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputBatch:
    """News of one commit. A request is either among the plain ones or among the detailed ones.

    Attributes:
        rids: requests that got exactly one more token and have no other news.
        token_ids: that token, in the same order.
        detailed: all other news: first tokens, logprobs, ends.
    """

    rids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    detailed: list[RequestOutput] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rids or self.detailed)

    def tokens(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every request with news and the tokens it got."""
        for rid, token in zip(self.rids, self.token_ids, strict=True):
            yield rid, (token,)
        for output in self.detailed:
            yield output.rid, output.new_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Gauges as of now and totals since the start.

    Attributes:
        num_running: rows that run, half-prefilled ones included.
        num_queued: requests that wait, for a grammar included.
        num_grammar_queued: requests that wait for a grammar.
        used_tokens: slots held by running rows or locked prefixes.
        cached_tokens: slots of prefixes that no one uses.
        max_total_tokens: slots of the pool.
        new_token_ratio: share of the output still allowed that admission reserves.
        gen_throughput: output tokens per second over the last log interval.
        totals: counters: ``requests``, ``prompt_tokens``, ``cached_prompt_tokens``, ``generated_tokens``,
            ``finished_requests``, ``aborted_requests``, ``failed_requests``, ``retractions``, ``preemptions``,
            ``deferrals``, ``prefill_batches``, ``decode_steps``, ``evicted_tokens``, ``dropped_tokens``, and
            ``fallback:<reason>``.
    """

    num_running: int
    num_queued: int
    num_grammar_queued: int
    used_tokens: int
    cached_tokens: int
    max_total_tokens: int
    new_token_ratio: float
    gen_throughput: float
    totals: Mapping[str, int]
