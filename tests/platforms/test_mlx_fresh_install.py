"""The laptop's whole story in a fresh environment: install the checkout with MLX, no torch, generate, serve."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]


class FreshEnvironment:
    """A virtual environment that shares nothing with the one that runs the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "venv"
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("CARDAN_", "PYTHON"))}
        self.variables = {**kept, "CARDAN_CACHE": str(self.scratch / "cache"), "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)

    def command(self, *words: str) -> list[str]:
        return [str(self.folder / "bin" / words[0]), *words[1:]]

    def run(self, *words: str) -> str:
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, cwd=self.scratch, env=self.variables, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    environment = FreshEnvironment(tmp_path_factory.mktemp("fresh"))
    environment.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{ROOT}[mlx]")
    return environment


def test_no_torch_is_installed(fresh):
    listed = json.loads(fresh.run("python", "-m", "pip", "list", "--format=json"))
    names = {entry["name"].lower() for entry in listed}
    assert {"cardan", "mlx"} <= names
    assert not {name for name in names if "torch" in name} | ({"transformers", "accelerate"} & names)


@pytest.mark.model
def test_the_capital_of_france(fresh, smollm2_path):
    limits = ("--max-new-tokens", "4", "--temperature", "0", "--max-total-tokens", "1024")
    model = ("--platform", "mlx", "--model", str(smollm2_path))
    assert "Paris" in fresh.run("cardan", "generate", *model, *limits, "The capital of France is")


def test_the_server_answers(fresh):
    tiny = fresh.scratch / "tiny"
    fresh.run(
        "python",
        "-c",
        f"from cardan.testing import write_tiny_model as w; w(__import__('pathlib').Path({str(tiny)!r}))",
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ("--platform", "mlx", "--model", str(tiny), "--random-weights", "1", "--max-total-tokens", "4096")
    server = subprocess.Popen(
        fresh.command("cardan", "serve", *flags, "--port", str(port)), cwd=fresh.scratch, env=fresh.variables
    )
    try:
        wait_ready(server, port)
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "temperature": 0.8, "seed": 3, "top_p": 0.9}
        answers = [post(port, "/v1/completions", body) for _ in range(2)]
        assert answers[0]["usage"]["completion_tokens"] <= 5
        assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        assert post(port, "/v1/chat/completions", chat)["choices"][0]["finish_reason"] in ("length", "stop")
        native = {"text": "hello", "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}}
        assert len(post(port, "/generate", native)["output_ids"]) == 3
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(30)
    assert code == 0


def wait_ready(server, port):
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        assert server.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError("the server was not ready in time")


def post(port, path, body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)
