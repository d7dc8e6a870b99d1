"""The CPU device without torch: native ops, linears, attention and pool, with this machine's threads and memory.

It knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cardan.errors import UnsupportedError
from cardan.platform import (
    AttentionBackend,
    CapturedStep,
    DeviceInfo,
    GraphRunner,
    LinearMethod,
    Memory,
    MemoryPolicy,
    OpsDevice,
    OpsKVPool,
    Recorder,
    SharedMemoryPolicy,
    host_memory,
)
from cardan.types import KVLayout
from cardan_cpu.host import compute_threads
from cardan_cpu.native_attention import NativeAttention
from cardan_cpu.native_graph import NativeGraphRunner, NativeRecorder
from cardan_cpu.native_kv_pool import NativeKVPool
from cardan_cpu.native_linear import ACTIVATIONS, NativeLinear
from cardan_cpu.native_ops import NativeOps
from cardan_native import Tensor, load, to_array


class NativeFetch:
    """Copies of tensors; ops compute at once, so there is nothing to wait for."""

    def __init__(self, arrays: Sequence[Tensor]) -> None:
        self._copies = tuple(to_array(x) for x in arrays)

    def wait(self) -> tuple[np.ndarray[Any, Any], ...]:
        """The copies."""
        return self._copies


class NativeDevice(OpsDevice):
    """All usable cores of the machine.

    Attributes:
        threads: how many compute.
        variant: the instruction set that the kernels are compiled for.
    """

    def __init__(
        self,
        info: DeviceInfo,
        threads: int = 0,
        variant: str | None = None,
        activations: str = ACTIVATIONS[0],
        crossovers: Mapping[str, int] | None = None,
    ) -> None:
        """Load the kernels and start their threads.

        Args:
            info: which device.
            threads: compute threads; 0 chooses.
            variant: of the kernels; None takes the best that runs here, or the one that ``CARDAN_ISA`` names.
            activations: what they are rounded to where weights are quantized, a member of ``ACTIVATIONS``.
            crossovers: numbers of rows at which linears change from one kernel to another, where they were measured.
        """
        self._info = info
        self._native = load(variant)
        self.variant = self._native.VARIANT
        self.threads = threads or compute_threads()
        self._native.set_threads(self.threads)
        self._ops = NativeOps(self._native)
        self._linears = (NativeLinear(self._native, activations, crossovers),)

    @property
    def info(self) -> DeviceInfo:
        """Which device this is."""
        return self._info

    @property
    def ops(self) -> NativeOps:
        """The ops table."""
        return self._ops

    def memory(self) -> Memory:
        """Memory of the machine or of its container."""
        return host_memory()

    def memory_policy(self) -> MemoryPolicy:
        """A share of what is free, since others use the memory too."""
        return SharedMemoryPolicy()

    def linear_methods(self) -> tuple[LinearMethod, ...]:
        """One for every format that the kernels take."""
        return self._linears

    def allocate_kv(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> OpsKVPool:
        """Zeros per layer, committed as they are first written."""
        return NativeKVPool(self._native, layout, num_slots, num_rows, max_length)

    def attention(self, name: str, pool: OpsKVPool, layout: KVLayout, dtype: str) -> AttentionBackend:
        """The backend ``native``.

        Raises:
            UnsupportedError: another name.
        """
        if name != NativeAttention.name or not isinstance(pool, NativeKVPool):
            raise UnsupportedError(
                f"Attention backend must be {NativeAttention.name} on {self.info.name} with the native kernels, "
                f"got {name!r}. Pass --attention-backend {NativeAttention.name}, or --platform-option kernels=torch."
            )
        return NativeAttention(pool)

    def graph_runner(self, pool: OpsKVPool, backend: AttentionBackend, step: CapturedStep) -> GraphRunner | None:
        """Records a step for each number of rows, and replays it by one call."""
        return NativeGraphRunner(backend, step) if isinstance(backend, NativeAttention) else None

    def recorder(self) -> Recorder:
        """Records kernels as graphs of decode steps do."""
        return NativeRecorder(self._native)

    def fetch(self, arrays: Sequence[Tensor]) -> NativeFetch:
        """Copy to numpy."""
        return NativeFetch(arrays)

    def close(self) -> None:
        """Let the threads go; memory goes with its last reference."""
        self._native.set_threads(1)
