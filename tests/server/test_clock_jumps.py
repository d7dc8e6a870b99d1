"""The wall clock set forward and back under a server: limits of time hold by another clock, and go on to hold."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

YEAR_S = 366 * 86400.0


@pytest.fixture
def leaping_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reading of the wall clock is a year later or earlier than the one before."""
    real, leaps, lock = time.time, itertools.cycle((0.0, YEAR_S, -YEAR_S, 2 * YEAR_S)), threading.Lock()

    def leaping() -> float:
        with lock:
            return real() + next(leaps)

    monkeypatch.setattr(time, "time", leaping)


def test_limits_of_time_hold(start_fake: Any, leaping_wall_clock: None, tmp_path: Path) -> None:
    server = start_fake(request_timeout_s=30.0, client_timeout_s=30.0, crash_dump_folder=str(tmp_path))
    server.engine.delay_s = 0.01
    asked = {"text": "x", "sampling_params": {"max_new_tokens": 10, "temperature": 0}}
    answers = [server.http.post("/generate", json=asked) for _ in range(6)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({json.dumps(answer.json()["output_ids"]) for answer in answers}) == 1
    for answer in answers:
        meta = answer.json()["meta_info"]
        assert 0 <= meta["queue_time"] <= meta["e2e_latency"] < 30
    stream = server.http.post("/generate", json={**asked, "stream": True}).text
    assert stream.rstrip().endswith("[DONE]")
    assert server.http.get("/health_generate").status_code == 200
    assert server.http.get("/metrics").status_code == 200
    server.wait_idle()


def test_a_limit_still_ends_what_is_too_long(start_fake: Any, leaping_wall_clock: None) -> None:
    server = start_fake(request_timeout_s=0.4)
    server.engine.delay_s = 0.05
    began_s = time.monotonic()
    late = server.http.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 1000}})
    assert late.status_code == 504
    assert 0.4 <= time.monotonic() - began_s < 10
    server.wait_idle()
