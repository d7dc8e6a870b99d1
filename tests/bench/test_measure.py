"""Sums over request records, against numbers worked out by hand."""

from __future__ import annotations

import json

import pytest

from cardan.bench.measure import RequestRecord, Spread, parse_goodput, summarize
from cardan.errors import ConfigError


def record(sent_s: float, times: list[float], tokens: list[int] | None = None, **counts: int) -> RequestRecord:
    made = RequestRecord(sent_s=sent_s)
    for now_s, count in zip(times, tokens or [1] * len(times), strict=True):
        made.add_chunk(now_s, count)
    made.prompt_tokens = counts.get("prompt", 10)
    made.completion_tokens = sum(made.chunk_tokens)
    made.cached_tokens = counts.get("cached", 0)
    return made


def test_times_of_one_request() -> None:
    one = record(1.0, [1.5, 1.6, 1.9])
    assert one.ttft_s == pytest.approx(0.5)
    assert one.e2e_s == pytest.approx(0.9)
    assert one.tpot_s == pytest.approx(0.2)
    assert one.itl_s == pytest.approx([0.1, 0.3])


def test_time_per_token_counts_the_tokens_of_a_piece() -> None:
    assert record(0.0, [1.0, 2.0], [2, 4]).tpot_s == pytest.approx(0.25)
    assert record(0.0, [1.0]).tpot_s is None


def test_pieces_without_tokens_do_not_count() -> None:
    one = record(0.0, [0.5, 1.0], [0, 1])
    assert one.ttft_s == 1.0


def test_summary() -> None:
    records = [
        record(0.0, [1.0, 2.0, 3.0], prompt=10, cached=4),
        record(1.0, [3.0, 5.0], prompt=30),
        RequestRecord(sent_s=2.0, error="boom"),
    ]
    report = summarize(records, {"ttft": 1500.0, "tpot": 1500.0})
    assert (report.completed, report.failed, report.errors) == (2, 1, ("boom",))
    assert report.duration_s == 5.0
    assert (report.prompt_tokens, report.cached_tokens, report.completion_tokens) == (40, 4, 5)
    assert report.input_lens == (10, 20.0, 30)
    assert report.output_lens == (2, 2.5, 3)
    assert report.request_throughput == pytest.approx(0.4)
    assert report.input_throughput == pytest.approx(8.0)
    assert report.output_throughput == pytest.approx(1.0)
    assert report.ttft_ms is not None
    assert report.ttft_ms.median == pytest.approx(1500.0)
    assert report.itl_ms is not None
    assert report.itl_ms.mean == pytest.approx(4000 / 3)
    assert report.goodput == pytest.approx(0.2)
    assert summarize(records).goodput is None
    assert json.loads(json.dumps(report.to_json()))["completed"] == 2


def test_goodput_counts_only_requests_within_every_limit() -> None:
    records = [record(0.0, [0.1, 0.2]), record(0.0, [0.1, 1.0])]
    assert summarize(records, {"ttft": 200.0}).goodput == pytest.approx(2.0)
    assert summarize(records, {"tpot": 200.0}).goodput == pytest.approx(1.0)
    assert summarize(records, {"e2e": 100.0}).goodput == 0.0


def test_percentiles() -> None:
    spread = Spread.of([value / 1000 for value in range(101)])
    assert spread is not None
    assert (spread.mean, spread.median, spread.p90, spread.p99) == pytest.approx((50, 50, 90, 99))
    assert Spread.of([]) is None


def test_nothing_answered() -> None:
    report = summarize([RequestRecord(sent_s=0.0)])
    assert (report.completed, report.failed, report.errors) == (0, 1, ("no token came",))
    assert report.ttft_ms is None
    assert report.output_throughput == 0.0


def test_goodput_limits_are_parsed() -> None:
    assert parse_goodput("ttft:300,tpot:50.5") == {"ttft": 300.0, "tpot": 50.5}


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "speed:3", "ttft:-1", ""])
def test_goodput_limits_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--goodput must be like ttft:300,tpot:50"):
        parse_goodput(text)
