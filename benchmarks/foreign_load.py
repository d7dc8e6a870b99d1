"""How much of the CPU other processes take while something is measured, from /proc.

It needs Linux. Its own process tree, children that have ended included, does not count as foreign.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def busy_s(stat: str) -> float:
    """Seconds that all cores together have worked, from the text of /proc/stat; idle and waiting do not count."""
    fields = [int(field) for field in stat.splitlines()[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def own_s(root: psutil.Process | None = None) -> float:
    """Seconds of CPU that this process and everything it started have used."""
    root = root or psutil.Process()
    total = 0.0
    for process in _family(root):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _family(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _alone_s() -> float:
    """Seconds that this process has used, and children of it that have ended."""
    times = psutil.Process().cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


@dataclass(slots=True)
class ForeignLoad:
    """Measures from ``start`` until ``stop``.

    Attributes:
        measured: processes that, with what they start, are measured; everything else but this process is then foreign,
            other children of it too. None counts all that this process started as its own.
    """

    measured: tuple[psutil.Process, ...] | None = None
    _wall_s: float = 0.0
    _busy_s: float = 0.0
    _own_s: float = 0.0

    def start(self) -> None:
        """Begin."""
        self._wall_s, self._busy_s, self._own_s = time.monotonic(), _read_busy_s(), self._used_s()

    def stop(self) -> float:
        """Cores that others kept busy meanwhile, on average."""
        wall_s = time.monotonic() - self._wall_s
        foreign_s = (_read_busy_s() - self._busy_s) - (self._used_s() - self._own_s)
        return max(0.0, foreign_s / wall_s)

    def _used_s(self) -> float:
        if self.measured is None:
            return own_s()
        return sum(own_s(root) for root in self.measured) + _alone_s()


def _read_busy_s() -> float:
    return busy_s(Path("/proc/stat").read_text())
