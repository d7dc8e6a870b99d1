"""Logs: contents only when asked for, JSON lines, and a disk that is full."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from cardan.config import EngineConfig, ServerConfig
from cardan.engine.process_log import JsonFormatter
from cardan.errors import ConfigError
from cardan.server.watching.request_log import LONGEST_CONTENTS


def ask(server: Any, text: str) -> str:
    answer = server.http.post("/generate", json={"text": text, "sampling_params": {"max_new_tokens": 4}})
    assert answer.status_code == 200
    return str(answer.json()["text"])


def fields_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if hasattr(record, "fields")]  # type: ignore[attr-defined]


def test_lengths_and_times_without_contents(start_fake: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = start_fake(log_requests=True)
    said = ask(server, "a secret question")
    (fields,) = fields_of(caplog)
    assert fields["finish_reason"] == "length"
    assert (fields["prompt_tokens"], fields["completion_tokens"]) == (17, 4)
    assert fields["queue_s"] <= fields["first_token_s"] <= fields["e2e_s"]
    assert not {"prompt", "text"} & fields.keys()
    assert "secret question" not in caplog.text
    assert said not in caplog.text


def test_contents_when_asked_for(start_fake: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = start_fake(log_requests=True, log_request_contents=True)
    said = ask(server, "a question")
    ask(server, "y" * 4000)
    server.http.post("/generate", json={"input_ids": [104, 105]})
    first, long, ids = fields_of(caplog)
    assert (first["prompt"], first["text"]) == ("a question", said)
    assert len(long["prompt"]) == 4000 < LONGEST_CONTENTS
    assert ids["prompt"] == "hi"


def test_contents_without_a_log_is_refused() -> None:
    with pytest.raises(ConfigError, match="--log-request-contents has no effect without --log-requests"):
        EngineConfig(server=ServerConfig(log_request_contents=True))


def test_json_lines() -> None:
    formatter = JsonFormatter("scheduler")
    try:
        raise ValueError("that\nwent wrong")
    except ValueError:
        record = logging.LogRecord("cardan.x", logging.ERROR, "f.py", 1, "two\nlines %d", (7,), sys.exc_info())
    record.fields = {"rid": "r", "odd": {1}}
    line = formatter.format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["message"] == "two\nlines 7"
    assert (entry["level"], entry["process"], entry["logger"], entry["rid"]) == ("error", "scheduler", "cardan.x", "r")
    assert "went wrong" in entry["error"]
    assert entry["time"].endswith("+00:00")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_loses_records_and_nothing_else() -> None:
    script = (
        "import logging; from cardan.config import ServerConfig; from cardan.engine.process_log import set_up_logging\n"
        "set_up_logging('scheduler', ServerConfig(log_format='json'))\n"
        "for _ in range(3): logging.getLogger('cardan.x').info('a record')\n"
        "print('went on')"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], check=False, stderr=full, stdout=subprocess.PIPE, text=True, timeout=60
        )
    assert done.stdout == "went on\n"
    # The interpreter itself flushes standard error when it ends; it says so by 120 at most.
    assert done.returncode in (0, 120)
