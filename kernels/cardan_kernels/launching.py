"""Where a kernel runs: on the device of its tensors, compiled, or on the CPU in Triton's interpreter.

It knows no kernel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from triton import knobs

from cardan.errors import PlatformError


def interpreted() -> bool:
    """Whether Triton was told to interpret kernels (``TRITON_INTERPRET=1``, set before it is first imported)."""
    return bool(knobs.runtime.interpret)


def on_device_of(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Entered around a launch, since Triton launches on the current device; nothing for tensors without memory.

    Raises:
        PlatformError: the tensor is in host memory, and kernels are compiled.
    """
    if x.device.type == "cuda":
        return torch.cuda.device(x.device)
    if x.device.type == "cpu" and not interpreted():
        raise PlatformError(
            "compiled kernels take tensors on a GPU, got one in host memory. Put it on the GPU, or set "
            "TRITON_INTERPRET=1 before Triton is imported to interpret kernels on the CPU."
        )
    return nullcontext()
