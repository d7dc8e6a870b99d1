"""The NPU device: torch's ops where they are enough, torch_npu's where they are documented, its memory, its graphs.

It knows no model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch_npu  # noqa: F401  registers the device type

from cardan.errors import UnsupportedError
from cardan.platform import (
    AttentionBackend,
    CapturedStep,
    Communicator,
    DeviceInfo,
    GraphRunner,
    LinearMethod,
    Memory,
    MemoryPolicy,
    OpsKVPool,
    RankPlace,
)
from cardan.types import KVLayout
from cardan_npu.attention import BACKENDS, FUSED, NpuAttention
from cardan_npu.graph import NpuGraphRunner, bucket_ladder
from cardan_npu.kv_pool import NpuKVPool
from cardan_npu.linear import NpuQuantLinear
from cardan_npu.memory import NPU_MEMORY
from cardan_npu.ops import NpuOps
from cardan_torch import (
    DenseLinear,
    OwnMemoryPolicy,
    TorchDevice,
    allocator_memory,
    allocator_peak,
)

logger = logging.getLogger(__name__)

NPU: Any = torch.npu  # type: ignore[attr-defined]

COLLECTIVES = "hccl"
"""What ranks speak through; torch knows it once torch_npu is imported."""


class NpuFetch:
    """Tensors on their way to the host."""

    def __init__(self, arrays: Sequence[torch.Tensor]) -> None:
        """Start copying; copies that are not waited for go to pinned memory."""
        wide = [x.float() if x.dtype is torch.bfloat16 else x for x in arrays]
        self._copies = [x.to("cpu", non_blocking=True, copy=True) for x in wide]
        self._event = NPU.Event()
        self._event.record()

    def wait(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Block until the copies are done."""
        self._event.synchronize()
        return tuple(x.numpy() for x in self._copies)


class NpuDevice(TorchDevice):
    """One Ascend NPU.

    Attributes:
        graph_rows: most rows of a decode step that is captured; 0 for none.
    """

    def __init__(self, info: DeviceInfo, graph_rows: int = 0) -> None:
        """Open the device.

        Args:
            info: which one.
            graph_rows: most rows of a captured decode step; 0 chooses by the size of the memory.
        """
        super().__init__(info, torch.device("npu", info.index))
        NPU.set_device(self.torch_device)
        self._npu_ops = NpuOps(self.torch_device)
        self._ops = self._npu_ops
        self.graph_rows = graph_rows or NPU_MEMORY.tier(info.total_memory).top_bucket
        self._linears = (NpuQuantLinear(self.torch_device), DenseLinear(self.torch_device))
        self._runners: list[NpuGraphRunner] = []
        self._told_of_types = False

    @property
    def ops(self) -> NpuOps:
        """The ops table."""
        return self._npu_ops

    def memory(self) -> Memory:
        """What the driver says, and what torch holds but does not use."""
        return allocator_memory(NPU, self.torch_device)

    def memory_policy(self) -> MemoryPolicy:
        """All of the NPU's memory but a head-room by its size."""
        return OwnMemoryPolicy(NPU_MEMORY, len(bucket_ladder(self.graph_rows)))

    def linear_methods(self) -> tuple[LinearMethod, ...]:
        """Quantized products, then torch's own."""
        return self._linears

    def allocate_kv(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> OpsKVPool:
        """Zeroed tensors per layer."""
        return NpuKVPool(layout, num_slots, num_rows, max_length, self.torch_device)

    def attention(self, name: str, pool: OpsKVPool, layout: KVLayout, dtype: str) -> AttentionBackend:
        """The backend ``fused`` or ``torch``.

        Raises:
            UnsupportedError: another name.
        """
        if name not in BACKENDS or not isinstance(pool, NpuKVPool):
            raise UnsupportedError(
                f"Attention backend must be one of {', '.join(BACKENDS)} on {self.info.name}, "
                f"got {name!r}. Pass --attention-backend {BACKENDS[0]}."
            )
        if name == FUSED and layout.dtype != dtype and not self._told_of_types:
            self._told_of_types = True
            logger.warning(
                "keys are %s and queries %s, of which npu_fused_infer_attention_score takes no pair: all layers go "
                "through torch's operators. Pass --kv-cache-dtype %s.",
                *(layout.dtype, dtype, dtype),
            )
        return NpuAttention(name, pool, layout, dtype)

    def graph_runner(self, pool: OpsKVPool, backend: AttentionBackend, step: CapturedStep) -> GraphRunner | None:
        """NPU graphs for decode steps."""
        if not isinstance(backend, NpuAttention):
            return None
        runner = NpuGraphRunner(backend, step, self.graph_rows)
        self._runners.append(runner)
        return runner

    def communicator(self, place: RankPlace) -> Communicator:
        """Join a group of ranks over HCCL; see ``OpsDevice.communicator``."""
        return self.join(place, COLLECTIVES)

    def activation_peak(self, run: Callable[[], None]) -> int | None:
        """By torch's allocator."""
        return allocator_peak(NPU, self.torch_device, run)

    def fetch(self, arrays: Sequence[torch.Tensor]) -> NpuFetch:  # type: ignore[override]
        """Start copying to the host."""
        return NpuFetch(arrays)

    def close(self) -> None:
        """Leave the group of ranks, also after an error of the device, and give graphs and cached memory back."""
        try:
            super().close()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        NPU.synchronize(self.torch_device)
        for runner in self._runners:
            runner.close()
        self._runners.clear()
        NPU.empty_cache()
