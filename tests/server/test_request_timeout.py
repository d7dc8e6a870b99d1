"""``--request-timeout-s``: what runs longer is aborted, and its client told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server_fakes import FakeEngine

MESSAGE = (
    "The request ran longer than 0.3 s, which is the most here, and was aborted. Ask for fewer tokens, or try again "
    "when less is going on."
)


@pytest.mark.parametrize("knob", ["slow", "stuck"])
def test_whole_answers(start_fake: Any, knob: str) -> None:
    engine = FakeEngine(delay_s=0.05)
    engine.hang = knob == "stuck"
    server = start_fake(engine, request_timeout_s=0.3)
    answer = server.http.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 100}})
    assert answer.status_code == 504
    error = answer.json()["error"]
    assert (error["message"], error["type"], error["code"]) == (MESSAGE, "server_error", "timeout")
    server.wait_idle()


def test_streams_end_with_an_error(start_fake: Any) -> None:
    server = start_fake(FakeEngine(delay_s=0.05), request_timeout_s=0.3)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 100, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        events = [json.loads(line[5:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert events[0]["choices"]
    assert events[-1]["error"]["message"] == MESSAGE
    server.wait_idle()


def test_shorter_ones_are_not_touched(start_fake: Any) -> None:
    server = start_fake(request_timeout_s=30.0)
    many = [server.http.post("/generate", json={"text": ["a", "b"]}).status_code for _ in range(3)]
    assert many == [200, 200, 200]
