"""A GPU as an ops device: everything that NVIDIA's and AMD's have in common.

It knows no model and no vendor: linears and further attention backends come from the platform that derives from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from cardan.errors import UnsupportedError
from cardan.platform import (
    AttentionBackend,
    CapturedStep,
    Communicator,
    DeviceInfo,
    Fetch,
    GraphRunner,
    LinearMethod,
    Memory,
    MemoryPolicy,
    OpsKVPool,
    RankPlace,
)
from cardan.types import KVLayout
from cardan_torch.device import TorchDevice
from cardan_torch.gpu.accelerator import Accelerator
from cardan_torch.gpu.graph import GpuGraphRunner, ReplayedAttention, bucket_ladder
from cardan_torch.gpu.kv_pool import GpuKVPool
from cardan_torch.gpu.library_attention import LibraryAttention
from cardan_torch.gpu.memory import GPU_MEMORY, TOP_BUCKET
from cardan_torch.gpu.ops import GpuOps
from cardan_torch.gpu.settings import INVARIANT
from cardan_torch.gpu.triton_attention import TritonAttention
from cardan_torch.own_memory import OwnMemoryPolicy


class GpuDevice(TorchDevice):
    """One GPU, or the stand-in for one.

    Attributes:
        accelerator: streams, copies, graphs and memory.
        deterministic: whether a row's attention must not depend on its batch.
        top_bucket: most rows that decode steps are captured for.
    """

    def __init__(
        self, info: DeviceInfo, accelerator: Accelerator, linears: Sequence[LinearMethod], options: Mapping[str, Any]
    ) -> None:
        """Open a device.

        Args:
            info: which it is.
            accelerator: open.
            linears: the preferred one first; the last takes dense weights.
            options: of the platform.
        """
        super().__init__(info, accelerator.device)
        self.accelerator = accelerator
        self.deterministic = bool(options.get(INVARIANT, False))
        by_memory = GPU_MEMORY.tier(accelerator.chip.total_memory).top_bucket
        self.top_bucket = int(options.get(TOP_BUCKET, 0)) or by_memory
        self._gpu_ops = GpuOps(accelerator)
        self._linears = tuple(linears)

    @property
    def ops(self) -> GpuOps:
        """The ops table."""
        return self._gpu_ops

    def scope(self) -> AbstractContextManager[Any]:
        """The compute stream, without gradients."""
        return self.accelerator.scope()

    def memory(self) -> Memory:
        """The GPU's own memory."""
        return self.accelerator.memory()

    def memory_policy(self) -> MemoryPolicy:
        """All of the memory but the head-room."""
        return OwnMemoryPolicy(GPU_MEMORY, len(bucket_ladder(self.top_bucket)))

    def linear_methods(self) -> tuple[LinearMethod, ...]:
        """See ``OpsDevice.linear_methods``."""
        return self._linears

    def allocate_kv(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> OpsKVPool:
        """Zeroed tensors per layer, which never move."""
        with self.scope():
            return GpuKVPool(self.accelerator, layout, (num_slots, num_rows, max_length))

    def attention(self, name: str, pool: OpsKVPool, layout: KVLayout, dtype: str) -> AttentionBackend:
        """A backend by name.

        Raises:
            UnsupportedError: it is unknown, or not available here.
            TypeError: the pool is another device's.
        """
        if not isinstance(pool, GpuKVPool):
            raise TypeError(f"the pool must come from this device's allocate_kv, got {type(pool).__name__}")
        makers = self.attention_makers()
        if name not in makers:
            raise UnsupportedError(
                f"Attention backend must be one of {', '.join(makers)} on {self.info.name}, got {name!r}. "
                f"Pass --attention-backend {TritonAttention.name}."
            )
        with self.scope():
            return makers[name](pool, layout, dtype)

    def attention_makers(self) -> Mapping[str, Callable[[GpuKVPool, KVLayout, str], AttentionBackend]]:
        """Backends by name: the Triton kernels, and a library's where there is one."""
        library = self.library_attention()
        found = {} if library is None else {library.name: partial(self._by_library, library)}
        return {TritonAttention.name: self._triton, **found}

    def library_attention(self) -> type[LibraryAttention[Any]] | None:
        """The attention of a library that is installed and knows the chip; None where there is none."""
        return None

    def _triton(self, pool: GpuKVPool, layout: KVLayout, dtype: str) -> TritonAttention:
        return TritonAttention(self.accelerator, pool, deterministic=self.deterministic)

    def _by_library(
        self, made: type[LibraryAttention[Any]], pool: GpuKVPool, layout: KVLayout, dtype: str
    ) -> AttentionBackend:
        return made(self.accelerator, pool, layout, dtype, self._triton(pool, layout, dtype))

    def graph_runner(self, pool: OpsKVPool, backend: AttentionBackend, step: CapturedStep) -> GraphRunner | None:
        """Captured decode steps, where the backend's plans can stay where they are."""
        if not isinstance(pool, GpuKVPool) or not isinstance(backend, ReplayedAttention):
            return None
        rows = max(min(self.top_bucket, pool.num_rows - 1), 1)
        return GpuGraphRunner(self.accelerator, backend, step, bucket_ladder(rows))

    def communicator(self, place: RankPlace) -> Communicator:
        """See ``OpsDevice.communicator``."""
        return self.join(place, self.accelerator.collectives)

    def activation_peak(self, run: Callable[[], None]) -> int | None:
        """See ``OpsDevice.activation_peak``."""
        return self.accelerator.peak(run)

    def fetch(self, arrays: Sequence[torch.Tensor]) -> Fetch:  # type: ignore[override]
        """Start copying to pinned host memory, on a stream of its own."""
        return self.accelerator.download(arrays)

    def close(self) -> None:
        """Leave the group of ranks, also after an error of the device, and close it."""
        try:
            super().close()
        finally:
            self.accelerator.close()
