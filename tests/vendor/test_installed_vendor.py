"""A stranger's wheel beside Cardan's: found, served with, and held to the conformance suite."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(process: subprocess.Popen[bytes], client: httpx.Client) -> None:
    for _ in range(600):
        assert process.poll() is None, process.stdout.read().decode() if process.stdout else ""
        with suppress(httpx.TransportError):
            if client.get("/ready").status_code == 200:
                return
        time.sleep(0.2)
    pytest.fail("the server was not ready within 120 s")


@contextmanager
def serving(environment: Any, *flags: str) -> Iterator[httpx.Client]:
    port = free_port()
    command = [
        str(environment.folder / "bin" / "cardan"),
        "serve",
        "--port",
        str(port),
        "--log-level",
        "warning",
        *flags,
    ]
    process = subprocess.Popen(
        command, cwd=environment.cache, env=environment.variables(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            wait_ready(process, client)
            yield client
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_the_wheel_is_what_runs(environment: Any) -> None:
    done = environment.run(
        "python", "-c", "import cardan, acme_cardan; print(cardan.__file__); print(acme_cardan.__file__)"
    )
    assert done.returncode == 0, done.stderr
    assert all(str(environment.folder) in line for line in done.stdout.splitlines())


def test_the_plugins_are_found_and_described(environment: Any) -> None:
    done = environment.run("cardan", "platforms", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["acme"]["origin"] == "acme-cardan 1.0.0"
    assert {rows["acme"]["state"], rows["beacon"]["state"]} == {"usable"}


@pytest.mark.parametrize(("name", "level"), [("acme", 2), ("beacon", 1)])
def test_the_vendor_conforms(environment: Any, name: str, level: int, tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    done = environment.run("cardan", "conform", "--platform", name, "--quick", "--json", str(report_file))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(report_file.read_text())
    assert report["passed"]
    assert report["level"] == level
    assert f"{name} conforms" in done.stdout
    parts = {outcome["part"]: outcome for outcome in report["outcomes"] if outcome["status"] == "passed"}
    everything = {"capabilities", "memory", "ops", "linear", "attention", "kv", "sampler", "end_to_end"}
    assert set(parts) == (everything if level == 2 else {"capabilities", "memory", "kv", "end_to_end"})
    assert all(outcome["detail"] for outcome in report["outcomes"] if outcome["status"] == "skipped")
    assert bool(report["benchmarks"]) is (level == 2)


def test_a_vendors_kernels_are_tuned(environment: Any, tiny_model: Path) -> None:
    done = environment.run("cardan", "tune", "--platform", "beacon")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "head_rows" in done.stdout
    model = ("--model", str(tiny_model), "--random-weights", "3")
    done = environment.run("cardan", "plan", "--platform", "beacon", *model, "--json")
    tuning = json.loads(done.stdout)["settings"]["tuning"]
    assert tuning["why"].startswith("tuned on ")
    assert tuning["why"].endswith("for Beacon B1, beacon-cardan 1.0.0")


def test_the_suite_runs_as_pytest(environment: Any) -> None:
    arguments = (
        "--pyargs",
        "cardan.testing",
        "--platform",
        "acme",
        "--conformance-only",
        "memory",
        "-q",
        "-p",
        "no:cacheprovider",
    )
    done = environment.run("python", "-m", "pytest", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b9 passed\b", done.stdout)


def test_a_tiny_model_is_served(environment: Any, tiny_model: Path) -> None:
    flags = ("--model", str(tiny_model), "--random-weights", "3", "--platform", "acme", "--max-total-tokens", "2048")
    with serving(environment, *flags) as client:
        body = {
            "text": "ab",
            "sampling_params": {"max_new_tokens": 8, "temperature": 0.7, "seed": 5, "ignore_eos": True},
        }
        first, again = (client.post("/generate", json=body).json() for _ in range(2))
        assert first["output_ids"] == again["output_ids"]
        assert first["meta_info"]["completion_tokens"] == 8
        info = client.get("/server_info").json()
        assert "acme" in json.dumps(info)


def test_what_a_level_1_device_lacks_is_refused_at_admission(environment: Any, tiny_model: Path) -> None:
    flags = ("--model", str(tiny_model), "--random-weights", "3", "--platform", "beacon", "--max-total-tokens", "2048")
    with serving(environment, *flags) as client:
        greedy = {"text": "ab", "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
        assert client.post("/generate", json=greedy).status_code == 200
        drawn = client.post("/generate", json={"text": "ab", "sampling_params": {"temperature": 0.7}})
        assert drawn.status_code == 400
        assert "platform 'beacon' does not support" in drawn.text
        assert "Pass temperature 0" in drawn.text


@pytest.mark.model
def test_smollm2_is_served(environment: Any, smollm2_path: Path) -> None:
    flags = ("--model", str(smollm2_path), "--platform", "acme", "--max-total-tokens", "512", "--context-length", "256")
    with serving(environment, *flags) as client:
        body = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        assert "Paris" in client.post("/generate", json=body).json()["text"]
