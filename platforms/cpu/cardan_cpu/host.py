"""The processor of this machine: name, instruction sets that matter, and how many cores may be used.

It does not import torch, so that probing costs nothing.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from cardan.platform.cgroups import SYSTEM_ROOT, cpu_quota

SHOWN_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True)
class Host:
    """The processor that this process runs on.

    Attributes:
        name: what its maker calls it.
        flags: instruction sets out of ``SHOWN_FLAGS`` that it has.
        cores: that this process may use, by affinity and CPU quota.
    """

    name: str
    flags: tuple[str, ...]
    cores: int

    @property
    def has_bfloat16(self) -> bool:
        """Whether it multiplies bfloat16 in hardware."""
        return not BFLOAT16_FLAGS.isdisjoint(self.flags)


def read_host(root: Path = SYSTEM_ROOT) -> Host:
    """Look at the machine; ``root`` stands for ``/`` in tests."""
    name, flags = _cpuinfo(root)
    return Host(name or platform.processor() or platform.machine(), flags, usable_cores(root))


def usable_cores(root: Path = SYSTEM_ROOT) -> int:
    """Cores by affinity, and fewer where a quota allows less."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return affinity if quota is None else min(affinity, quota)


def compute_threads(root: Path = SYSTEM_ROOT) -> int:
    """The usable cores, or as many as OMP_NUM_THREADS says where that is less."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    cores = usable_cores(root)
    return min(cores, int(asked)) if asked.isdecimal() and int(asked) > 0 else cores


def _cpuinfo(root: Path) -> tuple[str, tuple[str, ...]]:
    """Model name and flags of the first processor in ``/proc/cpuinfo``; empty where there is none."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    present = set((fields.get("flags") or fields.get("Features") or "").split())
    return fields.get("model name", ""), tuple(flag for flag in SHOWN_FLAGS if flag in present)
