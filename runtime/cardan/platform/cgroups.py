"""Limits that a container sets: memory and CPU time of the control groups that this process is in.

It reads the files of cgroup v1 and v2 and knows no device. Missing or unreadable files mean no limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSTEM_ROOT = Path("/")
UNLIMITED = 1 << 60
"""cgroup v1 writes a huge number where there is no limit."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A memory limit and what already counts against it, in bytes.

    Attributes:
        limit: of the group.
        used: by the group, without the file cache that the kernel can drop.
    """

    limit: int
    used: int

    @property
    def left(self) -> int:
        """What the group may still take."""
        return max(self.limit - self.used, 0)


def memory_limit(root: Path = SYSTEM_ROOT) -> MemoryLimit | None:
    """The tightest memory limit on this process (the one with least left), or None.

    Args:
        root: stands for ``/``; tests put a tree of fakes there.
    """
    limits = [limit for limit in (*_memory_v2(root), *_memory_v1(root)) if limit is not None]
    return min(limits, key=lambda limit: limit.left, default=None)


def cpu_quota(root: Path = SYSTEM_ROOT) -> int | None:
    """How many CPUs' worth of time this process may use, rounded up, or None."""
    quotas: list[float] = []
    for folder in _folders(root, ""):
        text = _read(folder / "cpu.max")
        if text and not text.startswith("max"):
            quota, period = text.split()[:2]
            quotas.append(int(quota) / int(period))
    for folder in _folders(root, "cpu"):
        quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota_us is not None and quota_us > 0 and period_us:
            quotas.append(quota_us / period_us)
    return max(1, math.ceil(min(quotas))) if quotas else None


def _memory_v2(root: Path) -> Iterator[MemoryLimit | None]:
    for folder in _folders(root, ""):
        yield _limit(folder, ("memory.max", "memory.current", "inactive_file"))


def _memory_v1(root: Path) -> Iterator[MemoryLimit | None]:
    for folder in _folders(root, "memory"):
        yield _limit(folder, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))


def _limit(folder: Path, names: tuple[str, str, str]) -> MemoryLimit | None:
    limit, used = _number(folder / names[0]), _number(folder / names[1])
    if limit is None or used is None or limit >= UNLIMITED:
        return None
    droppable = 0
    for line in (_read(folder / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == names[2] and value.strip().isdigit():
            droppable = int(value)
    return MemoryLimit(limit, max(used - droppable, 0))


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The folder of this process's group and of all groups above it; ``controller`` is empty for v2."""
    base = root / "sys/fs/cgroup"
    base = base / controller if controller else base
    path = _group_path(root, controller)
    if path is None:
        return
    parts = [part for part in path.split("/") if part]
    # inside a container the path may be that of the host, so groups that are not there are skipped
    for depth in range(len(parts), -1, -1):
        folder = base.joinpath(*parts[:depth])
        if folder.is_dir():
            yield folder


def _group_path(root: Path, controller: str) -> str | None:
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") if controller else number == "0":
            return path
    return None


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
