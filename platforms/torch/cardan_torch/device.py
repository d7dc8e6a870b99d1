"""What every torch device has in common: ops, KV pool, attention, dense linears, reading results.

It knows no kind of hardware: memory, its policy and better linears come from the platform that derives from this.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from cardan.errors import UnsupportedError
from cardan.platform import AttentionBackend, Communicator, DeviceInfo, LinearMethod, OpsDevice, OpsKVPool, RankPlace
from cardan.types import KVLayout
from cardan_torch.attention import TorchAttention
from cardan_torch.communicator import TorchCommunicator
from cardan_torch.kv_pool import TorchKVPool
from cardan_torch.linear import DenseLinear
from cardan_torch.ops import TorchOps

ATTENTION_BACKENDS = ("torch",)


class TorchFetch:
    """Tensors on their way to the host; copies are queued at once and waited for in ``wait``."""

    def __init__(self, arrays: Sequence[torch.Tensor]) -> None:
        wide = [x.float() if x.dtype is torch.bfloat16 else x for x in arrays]
        self._copies = [x.to("cpu", non_blocking=True, copy=True) for x in wide]
        self._event: Any = None
        if wide and wide[0].device.type != "cpu":
            self._event = torch.Event(wide[0].device)
            self._event.record()

    def wait(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Block until the copies are done."""
        if self._event is not None:
            self._event.synchronize()
        return tuple(x.numpy() for x in self._copies)


class TorchDevice(OpsDevice):
    """An ``OpsDevice`` on a torch device; subclasses add memory and its policy."""

    def __init__(self, info: DeviceInfo, device: torch.device | str = "cpu") -> None:
        self.torch_device = torch.device(device)
        self._info = info
        self._ops = TorchOps(self.torch_device)

    @property
    def info(self) -> DeviceInfo:
        """Which device this is."""
        return self._info

    @property
    def ops(self) -> TorchOps:
        """The ops table."""
        return self._ops

    def scope(self) -> AbstractContextManager[Any]:
        """Inference mode: torch then keeps no record for gradients."""
        return torch.inference_mode()

    def linear_methods(self) -> tuple[LinearMethod, ...]:
        """Dense weights by torch's own GEMM."""
        return (DenseLinear(self.torch_device),)

    def allocate_kv(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> OpsKVPool:
        """Zeroed tensors per layer."""
        return TorchKVPool(layout, num_slots, num_rows, max_length, self.torch_device)

    def attention(self, name: str, pool: OpsKVPool, layout: KVLayout, dtype: str) -> AttentionBackend:
        """The backend ``torch``.

        Raises:
            UnsupportedError: another name.
        """
        if name not in ATTENTION_BACKENDS or not isinstance(pool, TorchKVPool):
            raise UnsupportedError(
                f"Attention backend must be one of {', '.join(ATTENTION_BACKENDS)} on {self.info.name}, "
                f"got {name!r}. Pass --attention-backend torch."
            )
        return TorchAttention(pool)

    def fetch(self, arrays: Sequence[torch.Tensor]) -> TorchFetch:
        """Start copying to the host."""
        return TorchFetch(arrays)

    def join(self, place: RankPlace, library: str) -> Communicator:
        """Join a group of ranks, which ``close`` leaves; see ``OpsDevice.communicator``.

        Args:
            place: of this rank.
            library: torch's name of the library that ranks speak through.

        Raises:
            ConfigError: see ``TorchCommunicator``.
        """
        joined = TorchCommunicator(place, self.torch_device, library)
        self.ops.communicator = joined
        return joined

    def close(self) -> None:
        """Leave the group of ranks, where one was joined; tensors go with their last reference."""
        joined, self.ops.communicator = self.ops.communicator, None
        if joined is not None:
            joined.close()
