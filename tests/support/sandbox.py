"""Runs Python code that nobody has read: in a process of its own, with little time, memory and disk, and no network.

The network is cut by a namespace of its own where the system lets a user make one; elsewhere sockets are taken away in
the process, which only stops code that does not mean to get around it.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20
_UNSHARE = ("--map-root-user", "--net")
_PROLOGUE = """
import resource, socket
for kind, most in (
    (resource.RLIMIT_AS, {memory}), (resource.RLIMIT_CPU, {seconds}), (resource.RLIMIT_FSIZE, {file}),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(kind, (most, most))
class NoSocket(socket.socket):
    def __init__(self, *_, **__):
        raise OSError("there is no network here")
socket.socket = NoSocket
del resource, socket, NoSocket, kind, most
exec(compile(open("code.py", encoding="utf-8").read(), "code.py", "exec"), {{"__name__": "__main__"}})
"""


@dataclass(frozen=True)
class Ended:
    """How code ended.

    Attributes:
        well: whether it ran to its end without an exception, in time.
        said: the last line of what it wrote to its standard error, or why it was stopped.
    """

    well: bool
    said: str


def run_python(code: str, folder: Path, seconds: int = 10) -> Ended:
    """Run code with ``folder`` as its working folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "code.py").write_text(code, encoding="utf-8")
    prologue = _PROLOGUE.format(memory=MEMORY_BYTES, seconds=seconds, file=FILE_BYTES)
    try:
        done = subprocess.run(
            [*_without_network(), sys.executable, "-I", "-c", prologue],
            cwd=folder, env={"PATH": "/usr/bin:/bin"}, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=2 * seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Ended(False, f"stopped after {2 * seconds} seconds")
    if done.returncode == 0:
        return Ended(True, "")
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return Ended(False, lines[-1] if lines else f"exit code {done.returncode}")


@functools.cache
def _without_network() -> tuple[str, ...]:
    """The command that a process without a network is started by, where there is one that works."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    tried = subprocess.run([unshare, *_UNSHARE, "true"], capture_output=True, check=False)
    return (unshare, *_UNSHARE) if tried.returncode == 0 else ()
