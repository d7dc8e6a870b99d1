"""``/metrics``: every metric moves."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cardan.engine.api import EngineStats
from cardan.errors import EngineBusyError
from cardan.server.watching.metrics import _TOTALS, ServerMetrics
from cardan.server.watching.mirrored_metrics import NAMES


def samples(client: httpx.Client) -> dict[str, float]:
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return parse(response.text)


def parse(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "le")
            if not sample.name.endswith(("_bucket", "_created")):
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_requests_move_counters_and_histograms(client: httpx.Client) -> None:
    before = samples(client)
    for _ in range(2):
        body = {"text": "what moves", "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
        assert client.post("/generate", json=body).status_code == 200
    deadline = time.monotonic() + 5
    while True:
        after = samples(client)
        moved = {name: after[name] - before.get(name, 0) for name in after}
        if moved["cardan:generation_tokens_total"] >= 10 or time.monotonic() > deadline:
            break
    assert moved["cardan:prompt_tokens_total"] > 0
    assert moved["cardan:cached_tokens_total"] > 0
    assert moved["cardan:generation_tokens_total"] == 10
    assert moved["cardan:finished_requests_total{finish_reason=length}"] == 2
    assert moved["cardan:time_to_first_token_seconds_count"] == 2
    assert moved["cardan:time_to_first_token_seconds_sum"] > 0
    assert moved["cardan:queue_time_seconds_count"] == 2
    assert moved["cardan:e2e_request_latency_seconds_count"] == 2
    assert moved["cardan:e2e_request_latency_seconds_sum"] > 0
    # The first of each request is not between two; those that come together with it are not either.
    assert moved["cardan:inter_token_latency_seconds_count"] <= 8


def test_times_between_tokens_are_counted_one_by_one(start_fake: Any) -> None:
    server = start_fake()
    server.http.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 5}})
    assert samples(server.http)["cardan:inter_token_latency_seconds_count"] == 4


def test_finish_reasons_are_told_apart(start_fake: Any) -> None:
    server = start_fake()
    for text in ("[eos]", "[nan]", "x"):
        server.http.post("/generate", json={"text": text})
    after = samples(server.http)
    for reason in ("stop", "error", "length"):
        assert after[f"cardan:finished_requests_total{{finish_reason={reason}}}"] == 1


def test_gauges_follow_the_engine(start_fake: Any) -> None:
    from test_admin import Background

    server = start_fake()
    assert samples(server.http)["cardan:num_running_reqs"] == 0
    server.engine.hang = True
    with Background(server, rid="runs"):
        during = samples(server.http)
        server.engine.hang = False
    assert during["cardan:num_running_reqs"] == 1
    assert during["cardan:num_used_tokens"] == 10
    assert during["cardan:token_usage"] == 10 / (4 * 4096)
    server.engine.full = True
    after = samples(server.http)
    assert after["cardan:num_queue_reqs"] == 7
    assert after["cardan:num_evictable_tokens"] > 0
    assert after["cardan:gen_throughput"] > 0


def test_every_total_of_the_engine_is_shown() -> None:
    totals = {
        "prompt_tokens": 1,
        "cached_prompt_tokens": 2,
        "generated_tokens": 3,
        "requests": 4,
        "aborted_requests": 5,
        "failed_requests": 6,
        "retractions": 7,
        "prefill_batches": 8,
        "decode_steps": 9,
        "graph_replays": 10,
        "fallback:long queue": 11,
    }
    shown = parse(ServerMetrics().render(EngineStats(totals=totals)).decode())
    expected = {
        "cardan:prompt_tokens_total": 1,
        "cardan:cached_tokens_total": 2,
        "cardan:generation_tokens_total": 3,
        "cardan:scheduled_requests_total": 4,
        "cardan:aborted_requests_total": 5,
        "cardan:failed_requests_total": 6,
        "cardan:num_retractions_total": 7,
        "cardan:prefill_batches_total": 8,
        "cardan:decode_steps_total": 9,
        "cardan:graph_replays_total": 10,
        "cardan:fallbacks_total{reason=long queue}": 11,
    }
    assert {name: value for name, value in shown.items() if name in expected} == expected


def test_metrics_can_be_off(start_fake: Any) -> None:
    server = start_fake(enable_metrics=False)
    assert server.http.get("/metrics").status_code == 404


def test_two_servers_count_apart(start_fake: Any) -> None:
    first, second = start_fake(), start_fake()
    first.http.post("/generate", json={"text": "x"})
    assert samples(first.http)["cardan:finished_requests_total{finish_reason=length}"] == 1
    assert "cardan:finished_requests_total{finish_reason=length}" not in samples(second.http)


def test_an_engine_that_does_not_answer_leaves_what_the_server_knows(start_fake: Any, monkeypatch: Any) -> None:
    server = start_fake()
    server.http.post("/generate", json={"text": "x"})
    assert samples(server.http)["cardan:engine_answers"] == 1
    server.app.state.metrics_wait_s = 0.1

    async def never() -> EngineStats:
        await asyncio.Event().wait()
        raise AssertionError

    async def busy() -> EngineStats:
        raise EngineBusyError("The scheduler has not answered for 10 s.")

    for stats in (never, busy):
        monkeypatch.setattr(server.engine, "stats", stats)
        after = samples(server.http)
        assert after["cardan:engine_answers"] == 0
        assert after["cardan:finished_requests_total{finish_reason=length}"] == 1
        assert "cardan:num_running_reqs" not in after
        monkeypatch.undo()
    assert samples(server.http)["cardan:num_running_reqs"] == 0


def test_the_same_under_the_names_that_dashboards_know(start_fake: Any) -> None:
    server = start_fake()
    for _ in range(2):
        server.http.post("/generate", json={"text": "what moves", "sampling_params": {"max_new_tokens": 4}})
    shown, label = samples(server.http), "{model_name=tiny}"
    for ours, theirs in (
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("generation_tokens_total", "generation_tokens_total"),
        ("cached_tokens_total", "cached_tokens_total"),
        ("scheduled_requests_total", "num_requests_total"),
        ("time_to_first_token_seconds_count", "time_to_first_token_seconds_count"),
        ("inter_token_latency_seconds_sum", "inter_token_latency_seconds_sum"),
        ("e2e_request_latency_seconds_count", "e2e_request_latency_seconds_count"),
        ("queue_time_seconds_count", "queue_time_seconds_count"),
    ):
        assert shown[f"sglang:{theirs}{label}"] == shown[f"cardan:{ours}"] > 0
    for gauge in ("num_running_reqs", "num_queue_reqs", "token_usage", "num_used_tokens", "max_total_num_tokens"):
        assert shown[f"sglang:{gauge}{label}"] == shown[f"cardan:{gauge}"]
    # The second prompt is the first again, all but its last token of ten.
    assert shown[f"sglang:cache_hit_rate{label}"] == 9 / 20


def test_every_mirrored_name_is_one_of_ours() -> None:
    totals = dict.fromkeys(("evicted_tokens", *_TOTALS), 1)
    text = ServerMetrics("m").render(EngineStats(totals=totals)).decode()
    for ours, theirs in NAMES.items():
        assert f"# HELP cardan:{ours}" in text, ours
        assert f"# HELP sglang:{theirs}" in text, theirs


def test_answers_are_counted_by_status(start_fake: Any) -> None:
    server = start_fake()
    server.http.post("/generate", json={"text": "x"})
    server.http.post("/generate", json={})
    server.http.get("/nothing")
    shown = samples(server.http)
    for status in (200, 400, 404):
        assert shown[f"cardan:http_answers_total{{status={status}}}"] >= 1
