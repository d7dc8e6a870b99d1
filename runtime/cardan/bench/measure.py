"""What a benchmark measured, request by request and summed up.

It knows neither engine nor HTTP; times are seconds on one monotonic clock, reports are milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cardan.errors import ConfigError

GOODPUT_METRICS = ("ttft", "tpot", "e2e")
"""Metrics that a goodput limit may name."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request as it went.

    Attributes:
        sent_s: when it was sent.
        chunk_times_s: when each piece of the answer came.
        chunk_tokens: tokens in each piece.
        prompt_tokens: as the engine counted them.
        completion_tokens: as the engine counted them.
        cached_tokens: prompt tokens that came from the prefix cache.
        error: why it failed, or None.
    """

    sent_s: float
    chunk_times_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    def add_chunk(self, now_s: float, tokens: int) -> None:
        """Note a piece of the answer that brought tokens."""
        if tokens > 0:
            self.chunk_times_s.append(now_s)
            self.chunk_tokens.append(tokens)

    @property
    def succeeded(self) -> bool:
        """Whether it was answered."""
        return self.error is None and bool(self.chunk_times_s)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.chunk_times_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return self.chunk_times_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first, or None for a single token."""
        later = self.completion_tokens - self.chunk_tokens[0]
        return (self.e2e_s - self.ttft_s) / later if later > 0 else None

    @property
    def itl_s(self) -> list[float]:
        """Gaps between the pieces of the answer."""
        return [later - earlier for earlier, later in zip(self.chunk_times_s, self.chunk_times_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in milliseconds."""

    mean: float
    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        """Of some times in seconds; None for none."""
        if not seconds:
            return None
        values = np.asarray(seconds) * 1000
        median, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
        return cls(float(values.mean()), median, p90, p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """The outcome of a run.

    Attributes:
        completed: requests that were answered.
        failed: requests that were not.
        errors: the distinct reasons.
        duration_s: from the first request sent to the last token.
        prompt_tokens: in all answered requests.
        cached_tokens: of those, from the prefix cache.
        completion_tokens: in all answered requests.
        input_lens: shortest, mean and longest prompt that was really used.
        output_lens: the same of the answers.
        request_throughput: answered requests per second.
        input_throughput: prompt tokens per second.
        output_throughput: generated tokens per second.
        ttft_ms: time to the first token.
        tpot_ms: time per output token after the first.
        itl_ms: gaps between pieces of an answer.
        e2e_ms: time to the last token.
        goodput: requests per second within the limits, or None without limits.
    """

    completed: int
    failed: int
    errors: tuple[str, ...]
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    input_lens: tuple[int, float, int]
    output_lens: tuple[int, float, int]
    request_throughput: float
    input_throughput: float
    output_throughput: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    goodput: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As values that any JSON encoder takes."""
        return asdict(self)


def parse_goodput(text: str) -> dict[str, float]:
    """Limits in milliseconds from ``ttft:300,tpot:50``.

    Raises:
        ConfigError: it is malformed, or names no known metric.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, separator, number = part.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = -1.0
        if not separator or name not in GOODPUT_METRICS or not limit > 0:
            raise ConfigError(
                f"--goodput must be like ttft:300,tpot:50 (milliseconds; {', '.join(GOODPUT_METRICS)}), got {part!r}."
            )
        limits[name] = limit
    return limits


def summarize(records: Sequence[RequestRecord], limits: dict[str, float] | None = None) -> BenchReport:
    """Sum up a run.

    Args:
        records: all requests.
        limits: goodput limits in milliseconds by metric, or None.
    """
    answered = [record for record in records if record.succeeded]
    start_s = min((record.sent_s for record in records), default=0.0)
    duration_s = max((record.chunk_times_s[-1] for record in answered), default=start_s) - start_s
    per_second = 1 / duration_s if duration_s > 0 else 0.0
    prompt_tokens = sum(record.prompt_tokens for record in answered)
    completion_tokens = sum(record.completion_tokens for record in answered)
    within = [record for record in answered if _within(record, limits or {})]
    return BenchReport(
        completed=len(answered),
        failed=len(records) - len(answered),
        errors=tuple(sorted({record.error or "no token came" for record in records if not record.succeeded})),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(record.cached_tokens for record in answered),
        completion_tokens=completion_tokens,
        input_lens=_range([record.prompt_tokens for record in answered]),
        output_lens=_range([record.completion_tokens for record in answered]),
        request_throughput=len(answered) * per_second,
        input_throughput=prompt_tokens * per_second,
        output_throughput=completion_tokens * per_second,
        ttft_ms=Spread.of([record.ttft_s for record in answered]),
        tpot_ms=Spread.of([record.tpot_s for record in answered if record.tpot_s is not None]),
        itl_ms=Spread.of([gap for record in answered for gap in record.itl_s]),
        e2e_ms=Spread.of([record.e2e_s for record in answered]),
        goodput=len(within) * per_second if limits is not None else None,
    )


def _within(record: RequestRecord, limits: dict[str, float]) -> bool:
    measured = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2e": record.e2e_s}
    return all(measured[name] * 1000 <= limit for name, limit in limits.items())


def _range(lengths: list[int]) -> tuple[int, float, int]:
    return (min(lengths), sum(lengths) / len(lengths), max(lengths)) if lengths else (0, 0.0, 0)
