"""A device's memory as its driver and torch's allocator see it.

It knows no device: the part of torch that stands for one, such as ``torch.cuda``, is given to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cardan.platform import Memory


def allocator_memory(runtime: Any, device: torch.device) -> Memory:
    """What the driver says, and what torch holds but does not use."""
    free, total = runtime.mem_get_info(device)
    reserved = runtime.memory_reserved(device)
    spare = reserved - runtime.memory_allocated(device)
    return Memory(total=total, free=free + spare, reserved_by_others=max(total - free - reserved, 0))


def allocator_peak(runtime: Any, device: torch.device, run: Callable[[], None]) -> int:
    """Most bytes that ``run`` held at once beyond what was held before."""
    runtime.synchronize(device)
    runtime.empty_cache()
    before = int(runtime.memory_allocated(device))
    runtime.reset_peak_memory_stats(device)
    run()
    runtime.synchronize(device)
    return max(int(runtime.max_memory_allocated(device)) - before, 0)
