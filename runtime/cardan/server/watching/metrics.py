"""Prometheus metrics: gauges and totals read from the engine, histograms of what clients see.

Every metric here moves; a test makes each one move. It knows no route.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cardan.engine.api import EngineStats, GenerateOutput
from cardan.server.watching.mirrored_metrics import MirroredMetrics

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)

_TOTALS = {
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "cached_prompt_tokens": "Prompt tokens that came from the prefix cache.",
    "generated_tokens": "Output tokens.",
    "requests": "Requests that the scheduler took.",
    "aborted_requests": "Requests that were aborted.",
    "failed_requests": "Requests that ended with an error.",
    "retractions": "How often a running request lost its KV and was queued again.",
    "evicted_tokens": "Tokens of cached prefixes that had to make room.",
    "prefill_batches": "Prefill passes.",
    "decode_steps": "Decode passes.",
    "graph_replays": "Passes that replayed a captured graph.",
}
_NAMES = {
    "cached_prompt_tokens": "cached_tokens",
    "generated_tokens": "generation_tokens",
    "requests": "scheduled_requests",
    "retractions": "num_retractions",
}


class _EngineCollector(Collector):
    """Shows the engine's latest stats at each scrape."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = EngineStats()

    def collect(self) -> Iterable[Metric]:
        """Gauges, then totals; none of them while the engine does not answer."""
        text = "1 when the engine answered in time, 0 when its gauges and totals are missing."
        yield GaugeMetricFamily("cardan:engine_answers", text, value=int(self.stats is not None))
        text = "Tasks of the server's event loop; it falls back to what an idle server has."
        yield GaugeMetricFamily("cardan:event_loop_tasks", text, value=_num_tasks())
        if self.stats is not None:
            yield from _gauges(self.stats)
            yield from _totals(self.stats.totals)


def _num_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # nothing is served yet
        return 0


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    usage = stats.used_tokens / stats.max_total_tokens if stats.max_total_tokens else 0.0
    for name, text, value in (
        ("num_running_reqs", "Requests in the running set.", stats.num_running),
        ("num_queue_reqs", "Requests that wait.", stats.num_queued),
        ("num_grammar_queue_reqs", "Requests that wait for their grammar.", stats.num_grammar_queued),
        ("num_used_tokens", "KV slots that running requests hold.", stats.used_tokens),
        ("num_evictable_tokens", "KV slots of cached prefixes that nobody uses now.", stats.cached_tokens),
        ("max_total_num_tokens", "KV slots of the pool.", stats.max_total_tokens),
        ("token_usage", "Share of the KV pool that running requests hold, from 0 to 1.", usage),
        ("gen_throughput", "Output tokens per second over the last interval.", stats.gen_throughput),
    ):
        yield GaugeMetricFamily(f"cardan:{name}", text, value=value)


def _totals(totals: Mapping[str, int]) -> Iterator[Metric]:
    fallbacks = CounterMetricFamily("cardan:fallbacks", "Slower paths taken, by reason.", labels=["reason"])
    for key, value in totals.items():
        if key.startswith("fallback:"):
            fallbacks.add_metric([key.removeprefix("fallback:")], value)
        elif key in _TOTALS:
            yield CounterMetricFamily(f"cardan:{_NAMES.get(key, key)}", _TOTALS[key], value=value)
    if fallbacks.samples:
        yield fallbacks


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str = "") -> None:
        """Start at zero; ``model_name`` labels the mirrored ones."""
        self.registry = CollectorRegistry()
        self._mirrored = CollectorRegistry()
        self._mirrored.register(MirroredMetrics(self.registry, model_name))
        self._engine = _EngineCollector()
        self.registry.register(self._engine)
        self._finished = Counter(
            "cardan:finished_requests", "Choices that ended, by reason.", ["finish_reason"], registry=self.registry
        )
        self._answers = Counter(
            "cardan:http_answers", "Answers to HTTP requests, by status.", ["status"], registry=self.registry
        )
        self._first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._between = self._histogram(
            "inter_token_latency_seconds", "Between output tokens of a request.", TOKEN_BUCKETS_S
        )
        self._end_to_end = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self._queue = self._histogram("queue_time_seconds", "Waiting before the first prefill pass.")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S) -> Histogram:
        return Histogram(f"cardan:{name}", text, buckets=buckets, registry=self.registry)

    def observer(self) -> RequestObserver:
        """What watches the outputs of one request."""
        return RequestObserver(self)

    def latencies(self) -> dict[str, dict[str, Any]]:
        """What the two histograms that people look at hold, as plain data."""
        shown = {"time_to_first_token": self._first_token, "inter_token": self._between}
        return {name: _histogram_data(histogram) for name, histogram in shown.items()}

    def observe_answer(self, status: int) -> None:
        """Count the answer to an HTTP request; of a stream its status, however it ends."""
        self._answers.labels(str(status)).inc()

    def observe_first_token(self, output: GenerateOutput) -> None:
        """Count the first token of a choice."""
        if output.times.first_token_s is not None:
            self._first_token.observe(output.times.first_token_s)
        self._queue.observe(output.times.queue_s)

    def observe_gap(self, seconds: float, num_tokens: int) -> None:
        """Count the time that passed for ``num_tokens`` further tokens of a choice."""
        for _ in range(num_tokens):
            self._between.observe(seconds / num_tokens)

    def observe_end(self, output: GenerateOutput) -> None:
        """Count a choice that ended."""
        if output.finish_reason is not None:
            self._finished.labels(output.finish_reason.kind.value).inc()
        self._end_to_end.observe(output.times.e2e_s)

    def render(self, stats: EngineStats | None) -> bytes:
        """The text that ``/metrics`` answers with; None when the engine did not say how it is."""
        self._engine.stats = stats
        return generate_latest(self.registry) + generate_latest(self._mirrored)


def _histogram_data(histogram: Histogram) -> dict[str, Any]:
    """``bounds_s`` (None for the last), ``counts`` between them, ``sum_s`` and ``count``."""
    (family,) = histogram.collect()
    values = {sample.name.removeprefix(family.name): sample.value for sample in family.samples}
    upto = [(sample.labels["le"], sample.value) for sample in family.samples if "le" in sample.labels]
    below = [0.0, *(count for _, count in upto)]
    return {
        "bounds_s": [None if bound == "+Inf" else float(bound) for bound, _ in upto],
        "counts": [int(after - before) for before, after in itertools.pairwise(below)],
        "sum_s": values["_sum"],
        "count": int(values["_count"]),
    }


class AnswerCounter:
    """ASGI middleware that counts answers."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        """Stand before ``app``."""
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.observe_answer(message["status"])
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)


class RequestObserver:
    """Feeds the histograms from the outputs of one request; its choices are told apart."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._last_s: dict[int, float] = {}

    def see(self, output: GenerateOutput) -> None:
        """Take one output."""
        now_s = time.monotonic()
        if output.token_ids:
            before_s = self._last_s.get(output.index)
            if before_s is None:
                self._metrics.observe_first_token(output)
            else:
                self._metrics.observe_gap(now_s - before_s, len(output.token_ids))
            self._last_s[output.index] = now_s
        if output.finish_reason is not None:
            self._metrics.observe_end(output)
