"""The CPU device: torch's ops with this machine's threads, memory and linears.

It knows no model.
"""

from __future__ import annotations

import torch

from cardan.platform import DeviceInfo, LinearMethod, Memory, MemoryPolicy, SharedMemoryPolicy, host_memory
from cardan_cpu.host import read_host, usable_cores
from cardan_cpu.linear import CpuDenseLinear
from cardan_torch import TorchDevice


class CpuDevice(TorchDevice):
    """All usable cores of the machine."""

    def __init__(self, info: DeviceInfo, threads: int = 0) -> None:
        """Open the device.

        Args:
            info: which device.
            threads: compute threads; 0 chooses.
        """
        super().__init__(info, "cpu")
        self.threads = threads or default_threads()
        torch.set_num_threads(self.threads)
        self._linears = (CpuDenseLinear(read_host().has_bfloat16),)

    def memory(self) -> Memory:
        """Memory of the machine or of its container."""
        return host_memory()

    def memory_policy(self) -> MemoryPolicy:
        """A share of what is free, since others use the memory too."""
        return SharedMemoryPolicy()

    def linear_methods(self) -> tuple[LinearMethod, ...]:
        """Dense weights."""
        return self._linears


def default_threads() -> int:
    """The usable cores, or what torch starts with where that is less: it follows OMP_NUM_THREADS."""
    return min(usable_cores(), torch.get_num_threads())
