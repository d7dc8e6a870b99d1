"""How much memory MLX may take, and how it is divided.

It knows no model. On Apple silicon memory is unified: the device's recommended working set bounds what the GPU may
use, what is active counts against it, and other programs use the same memory. On Linux it is the host's.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

import mlx.core as mx

from cardan.errors import UnsupportedError
from cardan.platform import DeviceInfo, Memory, MemoryPlan, MemoryRequest, SharedMemoryPolicy, host_memory
from cardan_mlx.backend import Backend, backend
from cardan_mlx.kv_pool import TAIL_SHARE

MIB = 2**20
GIB = 2**30
CACHE_SHARE = 32
"""MLX may keep this part of all memory in freed buffers, and never more than ``MOST_CACHE``."""
MOST_CACHE = 1024 * MIB
LEAST_CACHE = 64 * MIB

TAILS_AT_ONCE = 3
"""Copies of the pool's tail that may exist: of two steps in flight, and of the one being described."""


def has_metal() -> bool:
    """Whether MLX computes on a GPU through Metal."""
    return backend() is Backend.METAL


def working_set() -> int | None:
    """Bytes that the GPU should keep in use at most, as its driver recommends; None without a GPU."""
    if not has_metal():
        return None
    recommended = mx.device_info().get("max_recommended_working_set_size")
    return int(recommended) if recommended else None


def describe_device() -> DeviceInfo:
    """The GPU, or the processor of the CPU build.

    Raises:
        UnsupportedError: MLX was built for Metal, and finds no GPU.
    """
    try:
        found = mx.device_info()
    except RuntimeError as error:
        raise UnsupportedError(
            f"MLX must find a GPU through Metal on platform 'mlx', got {str(error)!r}. "
            "Choose another platform; `cardan platforms` lists them."
        ) from error
    name = str(found.get("device_name") or found.get("architecture") or "unknown")
    kind = "Metal" if has_metal() else "MLX's CPU build"
    total = device_memory(host_memory(), working_set(), 0).total
    return DeviceInfo(index=0, name=name, detail=f"{kind}, mlx {version('mlx')}", total_memory=total)


def device_memory(host: Memory, recommended: int | None, active: int) -> Memory:
    """Memory as it is now.

    Args:
        host: what the machine, or its container, has.
        recommended: the device's recommended working set, or None where there is no such bound.
        active: bytes that MLX holds.
    """
    if recommended is None or host.total is None or host.free is None:
        return host
    total = min(host.total, recommended)
    free = max(min(host.free, recommended - active), 0)
    return replace(host, total=total, free=free, reserved_by_others=max(total - free - active, 0))


def cache_limit(total: int | None) -> int:
    """Bytes of freed buffers that MLX may keep for reuse, so that a long run does not grow."""
    return min(max((total or 0) // CACHE_SHARE, LEAST_CACHE), MOST_CACHE)


class MlxMemoryPolicy(SharedMemoryPolicy):
    """A share of what is free now, less the pool's tail and the buffers that MLX keeps.

    ``mx.zeros`` commits its memory at once, so what is planned is what is taken.
    """

    def __init__(self, kept: int) -> None:
        """Make a policy; ``kept`` is the limit of freed buffers that MLX keeps."""
        super().__init__()
        self._kept = kept

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        """See ``MemoryPolicy.plan``."""
        # a bound: the pool is smaller than what is free, and the tail at most this share of the pool
        tail = TAILS_AT_ONCE * max(request.memory.free or 0, 0) // TAIL_SHARE
        request = replace(request, graph_bytes=request.graph_bytes + tail + self._kept)
        planned = super().plan(request)
        what = f"the pool's tail ({tail // MIB} MiB) and freed buffers kept for reuse ({self._kept // MIB} MiB)"
        lines = tuple((name, size, what if name == "graphs" else why) for name, size, why in planned.lines)
        return replace(planned, lines=lines)
