"""The CPU device: torch's ops with this machine's threads, memory and linears.

It knows no model.
"""

from __future__ import annotations

import torch

from cardan.platform import (
    AttentionBackend,
    DeviceInfo,
    LinearMethod,
    Memory,
    MemoryPolicy,
    OpsKVPool,
    SharedMemoryPolicy,
    host_memory,
)
from cardan.types import KVLayout
from cardan_cpu.host import read_host, usable_cores
from cardan_cpu.ipex import IPEX
from cardan_cpu.linear import CpuDenseLinear
from cardan_torch import TorchDevice, TorchKVPool


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

    def attention(self, name: str, pool: OpsKVPool, layout: KVLayout, dtype: str) -> AttentionBackend:
        """The backend ``torch``, or ``ipex`` where that is installed.

        Raises:
            UnsupportedError: another name, or IPEX cannot attend here.
        """
        if name != IPEX or not isinstance(pool, TorchKVPool):
            return super().attention(name, pool, layout, dtype)
        from cardan_cpu.ipex_attention import IpexAttention

        return IpexAttention(pool)


def default_threads() -> int:
    """The usable cores, or what torch starts with where that is less: it follows OMP_NUM_THREADS."""
    return min(usable_cores(), torch.get_num_threads())
