"""A server of a config in a process of its own, for commands that ask one over HTTP.

It knows nothing of what is asked.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.context import SpawnProcess
from pathlib import Path

from cardan.cli.terminal import show_error
from cardan.config import EngineConfig
from cardan.errors import CardanError, EngineDeadError

HOST = "127.0.0.1"
START_S = 1800.0
"""Until a server must be ready: it loads weights, and may compile kernels."""
END_S = 90.0
"""Longer than a server takes at most to end what it was asked."""
POLL_S = 0.2
SHOWN_LINES = 12
"""Of its log where it fails."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is ready.

    Attributes:
        url: without ``/v1``.
        model: as requests name it.
        context_length: most tokens of a request.
    """

    url: str
    model: str
    context_length: int


@contextmanager
def serving(config: EngineConfig, log: Path) -> Iterator[Served]:
    """A server of this machine alone, on a free port, that ends with the context.

    Args:
        config: what is served; its host and port are replaced.
        log: file that its process writes to.

    Raises:
        EngineDeadError: it ended, or was not ready in time; the message has the end of its log.
    """
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = int(free.getsockname()[1])
    config = replace(config, server=replace(config.server, host=HOST, port=port))
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(config, str(log)))
    process.start()
    try:
        yield _ready(process, f"http://{HOST}:{port}", log)
    finally:
        process.terminate()
        process.join(END_S)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(config: EngineConfig, log: str) -> None:
    """What the process does: all that it and those that it starts print goes to the log."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from cardan.cli.serving import serve_config

    try:
        sys.exit(serve_config(config))
    except CardanError as error:
        show_error(error)
        sys.exit(1)


def _ready(process: SpawnProcess, url: str, log: Path) -> Served:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if not process.is_alive():
            raise EngineDeadError(f"The server ended with exit code {process.exitcode}. {_end_of(log)}")
        try:
            _get(f"{url}/ready")
            entry = json.loads(_get(f"{url}/v1/models"))["data"][0]
            return Served(url, entry["id"], entry["max_model_len"])
        except OSError:  # which URLError and HTTPError are
            time.sleep(POLL_S)
    raise EngineDeadError(f"The server was not ready after {START_S:g} s. {_end_of(log)}")


def _get(url: str) -> bytes:
    """The body, whatever proxy the environment names."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as answer:
        body: bytes = answer.read()
        return body


def _end_of(log: Path) -> str:
    if not log.is_file():
        return "It wrote no log."
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"The end of {log}:\n" + "\n".join(lines[-SHOWN_LINES:])
