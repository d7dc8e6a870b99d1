"""Starts, watches and ends the child processes of an engine.

It knows no message but the start-up line. Children are started as fresh interpreters (never forked), ignore the
signals that a terminal or a service manager sends to the whole group, and end when the parent does: the pipe
to their standard input closes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from cardan.config import EngineConfig
from cardan.errors import ConfigError

_BOOTSTRAP = (
    "import json, signal, sys; "
    "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "start = json.loads(sys.stdin.buffer.readline()); sys.path[:] = start['path']; "
    "from cardan.engine.children import child_main; child_main(start)"
)
_LONGEST_FOLDER = 103 - len("/detokenizer")
"""Longest name of the sockets' folder, in bytes: addresses of sockets have at most 103 on macOS, 107 on Linux."""
_ORPHANED = 113
"""Exit code of a child whose parent went away."""


class Child:
    """One child process."""

    def __init__(self, role: str, folder: Path) -> None:
        """Start it; it imports what it needs and then waits for ``configure``."""
        self.role = role
        # The first statement is a name for process listings.
        command = [sys.executable, "-c", f"'cardan::{role}'; {_BOOTSTRAP}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2)
        self._send({"path": sys.path, "role": role, "folder": str(folder)})

    def configure(self, config: EngineConfig) -> None:
        """Tell it what to run."""
        self._send(msgspec.to_builtins(config))

    def _send(self, line: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # it is dead already, and its watcher says so

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def watch(self, on_exit: Callable[[Child], None]) -> None:
        """Call ``on_exit`` from a thread as soon as it ends."""

        def wait() -> None:
            self._process.wait()
            on_exit(self)

        threading.Thread(target=wait, name=f"watch-{self.role}", daemon=True).start()

    def describe_exit(self) -> str:
        """How it ended, in words."""
        code = self._process.poll()
        if code is None:
            return "is running"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def kill(self) -> None:
        """End it now."""
        if self.running:
            self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end. Returns whether it has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def release(self) -> None:
        """Close the pipe that keeps it alive."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                return  # what was left in the buffer of a dead child


class Children:
    """The processes of one engine from their start until a frontend takes them, and the folder of their sockets.

    Interpreters take a second to start and import; whoever has something else to import meanwhile starts them first.
    """

    def __init__(self) -> None:
        """Start them.

        Raises:
            ConfigError: no folder for the sockets can be made.
        """
        self.folder = _socket_folder()
        self._children: list[Child] = []
        try:
            for role in ("scheduler", "detokenizer"):
                self._children.append(Child(role, self.folder))
        except BaseException:
            self.close()
            raise

    def take(self) -> list[Child]:
        """Hand them and their folder over to whoever ends them."""
        taken, self._children = self._children, []
        return taken

    def close(self) -> None:
        """End them where nobody has taken them."""
        if self._children:
            end_children(self.take(), 0.0)
            shutil.rmtree(self.folder, ignore_errors=True)


def _socket_folder() -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix="cardan-"))
    except OSError as error:
        raise ConfigError(
            f"No folder for the engine's sockets can be made: {error}. Set TMPDIR to a folder that can be written."
        ) from error
    if len(bytes(folder)) > _LONGEST_FOLDER:
        folder.rmdir()
        raise ConfigError(
            f"The folder for the engine's sockets, {folder}, has too long a name: the system takes at most "
            f"{_LONGEST_FOLDER} bytes. Set TMPDIR to a shorter one, such as /tmp."
        )
    return folder


def end_children(children: Sequence[Child], grace_s: float) -> None:
    """Wait up to ``grace_s`` for children that were told to end, then kill what is left; returns when all are gone."""
    deadline_s = time.monotonic() + grace_s
    for child in children:
        if not child.wait(max(0.0, deadline_s - time.monotonic())):
            child.kill()
    for child in children:
        child.wait(5.0)
        child.release()


def child_main(start: dict[str, Any]) -> NoReturn:
    """Entry of a child: import its role, read the config, run, and leave with an exit code."""
    if start["role"] == "scheduler":
        from cardan.engine.scheduler_process import run
    else:
        from cardan.engine.detokenizer_process import run
    line = sys.stdin.buffer.readline()
    if not line:
        _end_orphaned(Path(start["folder"]))
    config = msgspec.convert(json.loads(line), EngineConfig)
    folder = Path(start["folder"])
    threading.Thread(target=_end_with_parent, args=(folder,), name="parent-watch", daemon=True).start()
    code = run(config, folder)
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent(folder: Path) -> None:
    """Block until the parent closes the pipe, on purpose or because it is gone; then nobody else clears its folder."""
    while os.read(sys.stdin.fileno(), 4096):
        continue
    _end_orphaned(folder)


def _end_orphaned(folder: Path) -> NoReturn:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(_ORPHANED)
