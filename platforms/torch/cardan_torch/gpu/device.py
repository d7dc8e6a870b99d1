"""A GPU as an ops device: everything that NVIDIA's and AMD's have in common.

It knows no model and no vendor: linears and further attention backends come from the platform that derives from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from cardan.errors import UnsupportedError
from cardan.platform import (
    AttentionBackend,
    CapturedStep,
    DeviceInfo,
    Fetch,
    GraphRunner,
    LinearMethod,
    Memory,
    MemoryPolicy,
    OpsKVPool,
)
from cardan.types import KVLayout
from cardan_torch.device import TorchDevice
from cardan_torch.gpu.accelerator import Accelerator
from cardan_torch.gpu.graph import GpuGraphRunner, ReplayedAttention, bucket_ladder
from cardan_torch.gpu.kv_pool import GpuKVPool
from cardan_torch.gpu.memory import GpuMemoryPolicy, tier_of
from cardan_torch.gpu.ops import GpuOps
from cardan_torch.gpu.triton_attention import TritonAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSettings:
    """What a platform's options and the chip decide.

    Attributes:
        top_bucket: most rows that decode steps are captured for; 0 chooses by the size of the memory.
        deterministic: whether a row's result must not depend on its batch.
        float8_kv: torch's type for each KV type of 8 bits.
    """

    top_bucket: int = 0
    deterministic: bool = False
    float8_kv: Mapping[str, torch.dtype] = field(default_factory=dict)


class GpuDevice(TorchDevice):
    """One GPU.

    Attributes:
        accelerator: streams, copies, graphs and memory.
        settings: of the platform.
    """

    def __init__(
        self, info: DeviceInfo, accelerator: Accelerator, linears: Sequence[LinearMethod], settings: GpuSettings
    ) -> None:
        """Open a device.

        Args:
            info: which it is.
            accelerator: open.
            linears: the preferred one first; the last takes dense weights.
            settings: of the platform.
        """
        super().__init__(info, accelerator.device)
        self.accelerator = accelerator
        self.settings = settings
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

    @property
    def top_bucket(self) -> int:
        """Most rows that decode steps are captured for."""
        return self.settings.top_bucket or tier_of(self.accelerator.chip.total_memory).top_bucket

    def memory_policy(self) -> MemoryPolicy:
        """All of the memory but the head-room."""
        return GpuMemoryPolicy(len(bucket_ladder(self.top_bucket)))

    def linear_methods(self) -> tuple[LinearMethod, ...]:
        """See ``OpsDevice.linear_methods``."""
        return self._linears

    def allocate_kv(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> OpsKVPool:
        """Zeroed tensors per layer, which never move."""
        with self.scope():
            return GpuKVPool(self.accelerator, layout, (num_slots, num_rows, max_length), self.settings.float8_kv)

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
        """Backends by name; a platform adds those of libraries that are installed."""
        return {TritonAttention.name: self._triton}

    def _triton(self, pool: GpuKVPool, layout: KVLayout, dtype: str) -> AttentionBackend:
        return TritonAttention(self.accelerator, pool, deterministic=self.settings.deterministic)

    def graph_runner(self, pool: OpsKVPool, backend: AttentionBackend, step: CapturedStep) -> GraphRunner | None:
        """Captured decode steps, where the backend's plans can stay where they are."""
        if not isinstance(pool, GpuKVPool) or not isinstance(backend, ReplayedAttention):
            return None
        rows = max(min(self.top_bucket, pool.num_rows - 1), 1)
        return GpuGraphRunner(self.accelerator, backend, step, bucket_ladder(rows))

    def activation_peak(self, run: Callable[[], None]) -> int | None:
        """See ``OpsDevice.activation_peak``."""
        return self.accelerator.peak(run)

    def fetch(self, arrays: Sequence[torch.Tensor]) -> Fetch:  # type: ignore[override]
        """Start copying to pinned host memory, on a stream of its own."""
        return self.accelerator.download(arrays)

    def close(self) -> None:
        """Wait for what is under way, and give memory back."""
        self.accelerator.close()
