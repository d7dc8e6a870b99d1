"""``serve`` as a process: ready, signals, draining, the death of the engine, a port that is taken."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cardan.config import EngineConfig, ServerConfig
from cardan.engine.api import EngineInfo
from cardan.errors import ConfigError
from cardan.server import ServingInfo, serve
from cardan.server.serve import bind_socket
from cardan.testing import write_tiny_model

SCRIPT = Path(__file__).parent / "run_server.py"


class ServerProcess:
    """A server process and what it says."""

    def __init__(self, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(options)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def says(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self._lines.get(timeout=30))
        return said

    def wait_ready(self) -> ServerProcess:
        said = self.says()
        if said == {"loading": True}:
            said = self.says()
        assert said["model"] == "tiny"
        self.url = said["url"]
        return self

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, verify=False)

    def end(self) -> int:
        code = self.process.wait(30)
        self._reader.join(10)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def launch() -> Iterator[Callable[..., ServerProcess]]:
    launched: list[ServerProcess] = []

    def start(**options: Any) -> ServerProcess:
        launched.append(ServerProcess(**options))
        return launched[-1]

    yield start
    for server in launched:
        server.close()


class Stream:
    """A streamed request in a thread, with its events."""

    def __init__(self, server: ServerProcess, text: str, tokens: int) -> None:
        self._server = server
        self._body = {"text": text, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}, "stream": True}
        self.events: list[str] = []
        self.broken = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self.events and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.events

    def _run(self) -> None:
        try:
            with self._server.client() as client, client.stream("POST", "/generate", json=self._body) as response:
                for line in response.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
        except httpx.TransportError:
            self.broken = True

    def wait(self) -> list[str]:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.events


def test_sigterm_drains(launch: Any) -> None:
    server = launch(delay_s=0.05).wait_ready()
    with server.client() as client:
        assert client.get("/ready").status_code == 200
        stream = Stream(server, "x", 30)
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while client.get("/ready").status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        refused = client.post("/generate", json={"text": "y"})
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
    events = stream.wait()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["meta_info"]["finish_reason"] == {"type": "length", "length": 30}
    assert server.says() == {"closed": True, "open": 0}
    assert server.end() == 0


def test_sigint_when_idle_ends_at_once(launch: Any) -> None:
    server = launch().wait_ready()
    started = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    assert server.end() == 0
    assert time.monotonic() - started < 5


def test_drain_has_an_end(launch: Any) -> None:
    server = launch(delay_s=0.05, server={"drain_timeout_s": 0.3}).wait_ready()
    stream = Stream(server, "x", 2000)
    server.process.send_signal(signal.SIGTERM)
    events = stream.wait()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.says() == {"closed": True, "open": 0}
    assert server.end() == 0


def test_second_signal_stops_at_once(launch: Any) -> None:
    server = launch(delay_s=0.05, server={"drain_timeout_s": 60}).wait_ready()
    stream = Stream(server, "x", 2000)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert server.process.poll() is None
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert time.monotonic() - started < 5
    events = stream.wait()
    assert stream.broken or "error" in json.loads(events[-2])


def test_death_of_the_engine(launch: Any) -> None:
    server = launch(delay_s=0.02).wait_ready()
    stream = Stream(server, "[die]", 2000)
    events = stream.wait()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "engine_dead"
    assert server.end() == 1


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def _gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not alive


def test_sigterm_to_the_whole_group_drains_the_real_engine(launch: Any, model_folder: str) -> None:
    """What a terminal or a supervisor does: every process of the engine gets the signal, and still it drains."""
    server = launch(model=model_folder).wait_ready()
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) >= 2
    stream = Stream(server, "x", 40)
    os.killpg(server.process.pid, signal.SIGTERM)
    events = stream.wait()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    assert server.end() == 0
    assert _gone(children)


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_a_killed_process_ends_streams_and_server(launch: Any, model_folder: str, role: str) -> None:
    server = launch(model=model_folder).wait_ready()
    children = psutil.Process(server.process.pid).children(recursive=True)
    stream = Stream(server, "x", 2000)
    (killed,) = (child for child in children if f"cardan::{role}" in " ".join(child.cmdline()))
    killed.kill()
    events = stream.wait()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "engine_dead"
    assert server.end() == 1
    assert _gone(children)


def test_while_loading(launch: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as finder:
        port = finder.getsockname()[1]
    server = launch(loading_s=30, server={"port": port})
    assert server.says() == {"loading": True}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, verify=False) as client:
        for path in ("/ready", "/health", "/v1/models"):
            response = client.get(path)
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "The model is still loading."
            assert response.headers["retry-after"]
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0


def test_engine_that_does_not_start(launch: Any) -> None:
    server = launch(broken=True)
    assert server.says() == {"loading": True}
    assert server.says() == {"error": "The weights are truncated."}
    assert server.end() == 3


def test_port_in_use_is_told_before_anything_is_loaded() -> None:
    async def must_not_start(_: EngineConfig) -> Any:
        raise AssertionError("the engine was started")

    with bind_socket(ServerConfig(port=0)) as taken:
        port = taken.getsockname()[1]
        config = EngineConfig(server=ServerConfig(port=port))
        with pytest.raises(ConfigError, match=f"Cannot listen on --host 127.0.0.1 --port {port}: .*in use"):
            serve(config, start_engine=must_not_start)


def test_address_of_another_machine() -> None:
    with pytest.raises(
        ConfigError, match=r"Cannot listen on --host 203\.0\.113\.1 --port 0: .*\. Pass a --host that is"
    ):
        bind_socket(ServerConfig(host="203.0.113.1", port=0))


def test_host_name() -> None:
    with bind_socket(ServerConfig(host="localhost", port=0)) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    with pytest.raises(
        ConfigError, match=r"Cannot listen on --host no\.such\.host\.invalid .*\. Pass a --host that is"
    ):
        bind_socket(ServerConfig(host="no.such.host.invalid", port=0))


def test_port_that_the_user_may_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "socket", type("Socket", (socket.socket,), {"bind": bind}))
    with pytest.raises(ConfigError, match=r"--port 80: Permission denied\. Pass a --port from 1024 on"):
        bind_socket(ServerConfig(port=80))


async def test_small_answers_leave_at_once() -> None:
    """Without this each answer, and each event of a stream, waits some 40 ms for the client to confirm the last."""
    delays: list[int] = []

    async def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        delays.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    sock = bind_socket(ServerConfig(port=0))
    async with await asyncio.start_server(look, sock=sock):
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        await reader.read()
        writer.close()
    assert delays == [1]


def test_urls() -> None:
    info = EngineInfo(
        model_name="m",
        model_path="p",
        vocab_size=1,
        context_length=1,
        max_input_tokens=1,
        max_total_tokens=1,
        plan={},
        version="0",
    )
    assert ServingInfo("0.0.0.0", 80, info).url == "http://127.0.0.1:80"
    assert ServingInfo("::", 80, info).url == "http://[::1]:80"
    assert ServingInfo("192.0.2.7", 80, info).url == "http://192.0.2.7:80"


def test_importing_the_server_loads_nothing_heavy() -> None:
    heavy = ["torch", "mlx", "transformers", "zmq", "triton"]
    code = f"import sys, cardan.server.app; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
