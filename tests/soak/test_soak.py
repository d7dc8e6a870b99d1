"""Mixed traffic for minutes: memory stays where it was, and nothing is left behind.

``CARDAN_SOAK_MINUTES`` says how long: 3 in ``make test-more``, 30 in ``make soak``.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cardan.testing import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

MINUTES = float(os.environ.get("CARDAN_SOAK_MINUTES", "3"))
AT_ONCE = 16
SAMPLE_S = 2.0
MOST_GROWTH = 1.05
"""Of the median of the last third of the memory samples over that of the second third."""

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}

Send = Callable[[httpx.Client, random.Random], int]


def _messages(rng: random.Random) -> list[dict[str, str]]:
    # Half of the prompts share a long beginning, so that the tree grows, is reused and gives way.
    head = "The same beginning for all. " * 20 if rng.random() < 0.5 else ""
    return [{"role": "user", "content": head + "".join(rng.choices("abcdefgh ", k=rng.randint(1, 400)))}]


def _chat(rng: random.Random, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": _messages(rng), "max_tokens": rng.randint(1, 40), **more}


def whole(client: httpx.Client, rng: random.Random) -> int:
    return client.post("/v1/chat/completions", json=_chat(rng, n=rng.randint(1, 2), logprobs=True)).status_code


def streamed(client: httpx.Client, rng: random.Random) -> int:
    with client.stream("POST", "/v1/chat/completions", json=_chat(rng, stream=True)) as answer:
        answer.read()
    return answer.status_code


def left_early(client: httpx.Client, rng: random.Random) -> int:
    """The client goes away in the middle of a stream."""
    body = _chat(rng, stream=True) | {"max_tokens": 500, "ignore_eos": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for count, _ in enumerate(answer.iter_lines()):
            if count == 3:
                break
    return answer.status_code


def aborted(client: httpx.Client, rng: random.Random) -> int:
    rid = f"abort-{rng.random()}"
    body = {"text": "x", "rid": rid, "stream": True, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    with client.stream("POST", "/generate", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        httpx.post(client.base_url.join("/abort_request"), json={"rid": rid}, timeout=60, verify=False)
        for _ in lines:
            pass
    return answer.status_code


def bad(client: httpx.Client, rng: random.Random) -> int:
    bodies = [b"{", b"[]", b'{"messages": 3}', json.dumps(_chat(rng, temperature=-3)).encode()]
    return client.post("/v1/chat/completions", content=rng.choice(bodies)).status_code


def constrained(client: httpx.Client, rng: random.Random) -> int:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    answer = client.post("/v1/chat/completions", json=_chat(rng, response_format=form) | {"max_tokens": 40})
    if answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(answer.json()["choices"][0]["message"]["content"])["ok"], bool)
    return answer.status_code


def calling(client: httpx.Client, rng: random.Random) -> int:
    body = _chat(rng, tools=[TOOL], tool_choice="required") | {"max_tokens": 60}
    return client.post("/v1/chat/completions", json=body).status_code


KINDS: dict[str, tuple[Send, int]] = {
    "whole": (whole, 200),
    "streamed": (streamed, 200),
    "left early": (left_early, 200),
    "aborted": (aborted, 200),
    "bad": (bad, 400),
    "constrained": (constrained, 200),
    "calling": (calling, 200),
}
"""What clients send, and the status that each gets."""


class Traffic:
    """Clients that send until they are told to stop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.outcomes: Counter[tuple[str, int]] = Counter()
        self.failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(AT_ONCE)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            with httpx.Client(base_url=self._url, timeout=120, verify=False) as client:
                while not self._stop.is_set():
                    name = rng.choice(list(KINDS))
                    self.outcomes[name, KINDS[name][0](client, rng)] += 1
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.failures.append(error)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A server on the null platform in processes of its own."""
    command = [str(Path(sys.executable).with_name("cardan")), "serve", "--model", str(write_tiny_model(tmp_path / "m"))]
    command += ["--platform", "null", "--platform-option", "step_ms=2", "--served-model-name", "tiny", "--port", "0"]
    command += [
        "--max-total-tokens",
        "16384",
        "--chat-template",
        "llama3",
        "--tool-call-parser",
        "llama3",
        "--log-format",
        "json",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = ""
    for line in process.stderr:
        entry = json.loads(line) if line.startswith("{") else {}
        if entry.get("message") == "ready":
            url = entry["url"]
            break
    assert url, "the server did not get ready"
    # What it says is read, or it would wait for a reader.
    reader = threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True)
    reader.start()
    yield url, psutil.Process(process.pid)
    process.terminate()
    assert process.wait(60) == 0
    reader.join(10)
    process.stderr.close()


def memory(process: psutil.Process) -> int:
    """PSS of all processes of the server, in bytes."""
    return sum(one.memory_full_info().pss for one in (process, *process.children(recursive=True)))


def gauges(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", timeout=60, verify=False).text
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_memory_stays_and_nothing_is_left(server: tuple[str, psutil.Process]) -> None:
    url, process = server
    idle = gauges(url)
    samples: list[int] = []
    with Traffic(url) as traffic:
        deadline = time.monotonic() + MINUTES * 60
        while time.monotonic() < deadline and not traffic.failures:
            time.sleep(SAMPLE_S)
            samples.append(memory(process))
    assert not traffic.failures, traffic.failures[0]
    for name, (_, status) in KINDS.items():
        got = {code: count for (kind, code), count in traffic.outcomes.items() if kind == name}
        assert set(got) == {status}, f"{name}: {got}"
    third = len(samples) // 3
    before, after = statistics.median(samples[third : 2 * third]), statistics.median(samples[2 * third :])
    print(f"{sum(traffic.outcomes.values())} requests; PSS {before / 2**20:.0f} MiB, then {after / 2**20:.0f} MiB")  # noqa: T201
    assert after <= MOST_GROWTH * before
    deadline = time.monotonic() + 30
    while (now := gauges(url))["cardan:num_running_reqs"] and time.monotonic() < deadline:
        time.sleep(0.1)
    for name in ("num_running_reqs", "num_queue_reqs", "num_grammar_queue_reqs", "num_used_tokens"):
        assert now[f"cardan:{name}"] == 0, name
    while gauges(url)["cardan:event_loop_tasks"] > idle["cardan:event_loop_tasks"]:
        assert time.monotonic() < deadline, "tasks of the event loop are left"
        time.sleep(0.5)
