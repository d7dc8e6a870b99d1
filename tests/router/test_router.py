"""Behind the routers that people put before such servers: two real Cardan servers, and the routers' own programs.

``CARDAN_TEST_ROUTERS`` names the programs, parted by colons (``make test-more`` installs and names them).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cardan.testing import write_tiny_model

pytestmark = pytest.mark.slow

ROUTERS = [program for program in os.environ.get("CARDAN_TEST_ROUTERS", "").split(":") if Path(program).is_file()]
START_S = 120
GROUPS, PER_GROUP = 10, 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(url: str, process: subprocess.Popen[bytes], check: Any) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{url} ended before it served"
        try:
            if check(httpx.get(url, timeout=5, verify=False)):
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"{url} did not get ready")


class Worker:
    """A Cardan server on the null platform: real processes, real cache, no weights."""

    def __init__(self, model: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [str(Path(sys.executable).with_name("cardan")), "serve", "--model", str(model), "--platform", "null"]
        command += ["--platform-option", "step_ms=5", "--max-total-tokens", "65536", "--served-model-name", "tiny"]
        command += ["--port", self.url.rpartition(":")[2], "--log-level", "error"]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)

    def wait_ready(self) -> None:
        wait_for(f"{self.url}/ready", self.process, lambda answer: answer.status_code == 200)

    def totals(self) -> dict[str, int]:
        totals: dict[str, int] = httpx.get(f"{self.url}/server_info", verify=False).json()["stats"]["totals"]
        return totals

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def two_workers(folder: Path) -> Iterator[list[Worker]]:
    model = write_tiny_model(folder / "tiny")
    with ExitStack() as stack:
        workers = [Worker(model) for _ in range(2)]
        for worker in workers:
            stack.callback(worker.kill)
        for worker in workers:
            worker.wait_ready()
        yield workers


@contextmanager
def routed(program: str, workers: list[Worker], log: Path) -> Iterator[str]:
    """The router before the workers, once it knows both."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [program, "launch", "--policy", "cache_aware", "--host", "127.0.0.1"]
    command += ["--port", url.rpartition(":")[2], "--prometheus-port", str(free_port())]
    command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "2"]
    command += ["--worker-urls", *(worker.url for worker in workers)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for(f"{url}/workers", process, lambda answer: len(healthy(answer)) == len(workers))
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def healthy(answer: httpx.Response) -> list[str]:
    """Workers that the router sends requests to."""
    return [worker["url"] for worker in answer.json().get("workers", []) if worker.get("is_healthy")]


@pytest.fixture(
    params=ROUTERS or [pytest.param("", marks=pytest.mark.skip(reason="CARDAN_TEST_ROUTERS names no program"))]
)
def router(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prompts() -> list[str]:
    """Groups of prompts that share their beginning, mixed as clients mix them."""
    heads = [f"Group {group}. " + "The same long words for all of this group. " * 8 for group in range(GROUPS)]
    return [f"{heads[i % GROUPS]} Question {i}." for i in range(GROUPS * PER_GROUP)]


def complete(url: str, prompt: str) -> int | str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, verify=False)
    except httpx.HTTPError as error:
        return type(error).__name__
    assert answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] == 8
    return answer.status_code


def hit_rate(workers: list[Worker]) -> float:
    totals: Counter[str] = Counter()
    for worker in workers:
        totals.update(worker.totals())
    return totals["cached_prompt_tokens"] / totals["prompt_tokens"]


def test_every_route_that_routers_pass_on(router: str, tmp_path: Path) -> None:
    with two_workers(tmp_path) as workers, routed(router, workers, tmp_path / "log") as url:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 4}),
            ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 4}}),
        ):
            answer = httpx.post(url + path, json=body, timeout=60, verify=False)
            assert answer.status_code == 200, f"{path}: {answer.text}"
            with httpx.stream("POST", url + path, json={**body, "stream": True}, timeout=60, verify=False) as stream:
                lines = [line for line in stream.iter_lines() if line]
            assert stream.status_code == 200
            assert lines[-1] == "data: [DONE]", path
        bad = httpx.post(f"{url}/v1/chat/completions", json={**chat, "temperature": -1}, timeout=60, verify=False)
        assert bad.status_code == 400


def test_prefixes_are_found_again_through_the_router(router: str, tmp_path: Path) -> None:
    """The share of cached tokens is within five points of one server's."""
    with two_workers(tmp_path) as workers:
        alone = workers[:1]
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda prompt: complete(alone[0].url, prompt), prompts())) == {200}
        expected = hit_rate(alone)
        for worker in workers:
            assert httpx.post(f"{worker.url}/flush_cache", verify=False).status_code == 200
        before = [worker.totals() for worker in workers]
        with routed(router, workers, tmp_path / "log") as url, ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda prompt: complete(url, prompt), prompts())) == {200}
        after = [worker.totals() for worker in workers]
    gained = {
        name: sum(new.get(name, 0) - old.get(name, 0) for new, old in zip(after, before, strict=True))
        for name in ("cached_prompt_tokens", "prompt_tokens")
    }
    assert expected > 0.5
    assert gained["cached_prompt_tokens"] / gained["prompt_tokens"] >= expected - 0.05


def test_a_dead_worker_costs_no_answer_that_is_not_told(router: str, tmp_path: Path) -> None:
    """Of 200 requests during which one of two servers is killed, each gets an answer or a clear error."""
    with two_workers(tmp_path) as workers, routed(router, workers, tmp_path / "log") as url:
        with ThreadPoolExecutor(8) as pool:
            pending = [pool.submit(complete, url, prompt) for prompt in prompts()]
            while sum(future.done() for future in pending) < 40:
                time.sleep(0.01)
            workers[0].kill()
            outcomes = Counter(future.result() for future in pending)
        assert sum(outcomes.values()) == GROUPS * PER_GROUP
        assert outcomes.keys() <= {200, 500, 502, 503, 504}, outcomes
        assert outcomes[200] >= GROUPS * PER_GROUP - 16, outcomes
        deadline = time.monotonic() + 30
        while workers[0].url in healthy(httpx.get(f"{url}/workers", verify=False)):
            assert time.monotonic() < deadline, "the router still sends to a dead server"
            time.sleep(0.2)
        assert complete(url, "after that") == 200
