"""Runs a program as several ranks, each in a process of its own; ranks meet in a file, so that no port can be taken.

It knows no platform.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

ADDRESS = "127.0.0.1:29500"
"""What ranks are told; nothing listens there."""

_MEET = """
    import sys
    sys.path[:0] = {paths!r}
    from torch import distributed

    rank, address = {rank}, {address!r}

    def meet(*arguments, init_method, join=distributed.init_process_group, **options):
        assert init_method == f"tcp://{{address}}", init_method
        join(*arguments, init_method={meeting!r}, **options)

    distributed.init_process_group = meet
"""


def run_ranks(program: str, folder: Path, paths: Sequence[Path], size: int = 2, timeout_s: float = 120) -> None:
    """Run a program as all ranks of a group; it finds ``rank`` and ``address`` set, and ``paths`` in ``sys.path``.

    Raises:
        AssertionError: one failed, or did not end in time; with what all of them said.
    """
    logs = [folder / f"rank-{rank}.txt" for rank in range(size)]
    told = {"paths": [str(path) for path in paths], "address": ADDRESS, "meeting": f"file://{folder / 'meeting'}"}
    ranks = []
    try:
        for rank, log in enumerate(logs):
            code = textwrap.dedent(_MEET.format(rank=rank, **told)) + textwrap.dedent(program)
            with log.open("w", encoding="utf-8") as file:
                ranks.append(subprocess.Popen([sys.executable, "-c", code], stdout=file, stderr=file))
        end = time.monotonic() + timeout_s
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        codes = [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = "\n".join(f"rank {rank} ended with {code}:\n{logs[rank].read_text()}" for rank, code in enumerate(codes))
    assert codes == [0] * size, f"within {timeout_s} s (None is still running), {said}"
