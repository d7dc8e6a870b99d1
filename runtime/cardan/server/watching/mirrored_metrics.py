"""The server's metrics a second time, under the names that SGLang's dashboards, autoscalers and routers read.

It measures nothing: values are those of ``cardan.server.watching.metrics``, with the label ``model_name`` added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

NAMES = {
    "num_running_reqs": "num_running_reqs",
    "num_queue_reqs": "num_queue_reqs",
    "num_grammar_queue_reqs": "num_grammar_queue_reqs",
    "num_used_tokens": "num_used_tokens",
    "max_total_num_tokens": "max_total_num_tokens",
    "token_usage": "token_usage",
    "gen_throughput": "gen_throughput",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "cached_tokens": "cached_tokens",
    "scheduled_requests": "num_requests",
    "aborted_requests": "num_aborted_requests",
    "num_retractions": "num_retracted_requests",
    "evicted_tokens": "evicted_tokens",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "queue_time_seconds": "queue_time_seconds",
}
"""Our name of each mirrored metric, and its name there; both without prefix, and counters without ``_total``."""

OURS, THEIRS = "cardan:", "sglang:"


class MirroredMetrics(Collector):
    """Mirrors what a collector gives."""

    def __init__(self, source: Collector, model_name: str) -> None:
        """Take the collector, and the value of the label."""
        self._source = source
        self._labels = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        """The mirrored families, and the hit rate that those dashboards show."""
        families = {metric.name.removeprefix(OURS): metric for metric in self._source.collect()}
        for name, metric in families.items():
            if name in NAMES:
                yield self._mirrored(metric, THEIRS + NAMES[name])
        yield from self._hit_rate(families)

    def _mirrored(self, metric: Metric, name: str) -> Metric:
        copy = Metric(name, metric.documentation, metric.type, metric.unit)
        for sample in metric.samples:
            shown = name + sample.name.removeprefix(metric.name)
            copy.samples.append(Sample(shown, {**sample.labels, **self._labels}, sample.value, sample.timestamp))
        return copy

    def _hit_rate(self, families: dict[str, Metric]) -> Iterator[Metric]:
        cached, prompt = (_total(families.get(name)) for name in ("cached_tokens", "prompt_tokens"))
        if cached is None or prompt is None:
            return
        text = "Share of all prompt tokens since the start that came from the prefix cache."
        family = GaugeMetricFamily(f"{THEIRS}cache_hit_rate", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), cached / prompt if prompt else 0.0)
        yield family


def _total(metric: Metric | None) -> float | None:
    samples: Iterable[Sample] = metric.samples if metric is not None else ()
    return next((sample.value for sample in samples if sample.name.endswith("_total")), None)
