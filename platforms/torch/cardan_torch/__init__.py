"""What torch devices share: eager ops, linears, KV pool, attention over slots, own memory, graph sizes, ranks.

It knows no kind of hardware; platforms derive their devices from ``TorchDevice``. Importing it imports no torch: a
platform is asked whether it can run before anything of it is needed, and torch takes seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cardan_torch.allocator import allocator_memory, allocator_peak
    from cardan_torch.attention import TorchAttention
    from cardan_torch.communicator import TorchCommunicator
    from cardan_torch.device import ATTENTION_BACKENDS, TorchDevice, TorchFetch
    from cardan_torch.gpu.library_attention import LibraryAttention, LibraryPlan
    from cardan_torch.kv_pool import TorchKVPool
    from cardan_torch.ladder import Ladder, row_counts
    from cardan_torch.linear import DenseLinear, DenseWeight
    from cardan_torch.ops import TorchOps
    from cardan_torch.own_memory import GIB, MIB, OwnMemory, OwnMemoryPolicy, Tier
    from cardan_torch.tensors import DENSE_FORMATS, torch_dtype

__all__ = [
    "ATTENTION_BACKENDS",
    "DENSE_FORMATS",
    "GIB",
    "MIB",
    "DenseLinear",
    "DenseWeight",
    "Ladder",
    "LibraryAttention",
    "LibraryPlan",
    "OwnMemory",
    "OwnMemoryPolicy",
    "Tier",
    "TorchAttention",
    "TorchCommunicator",
    "TorchDevice",
    "TorchFetch",
    "TorchKVPool",
    "TorchOps",
    "allocator_memory",
    "allocator_peak",
    "row_counts",
    "torch_dtype",
]

_MODULES = {
    "ATTENTION_BACKENDS": "device",
    "DENSE_FORMATS": "tensors",
    "DenseLinear": "linear",
    "DenseWeight": "linear",
    "GIB": "own_memory",
    "Ladder": "ladder",
    "LibraryAttention": "gpu.library_attention",
    "LibraryPlan": "gpu.library_attention",
    "MIB": "own_memory",
    "OwnMemory": "own_memory",
    "OwnMemoryPolicy": "own_memory",
    "Tier": "own_memory",
    "TorchAttention": "attention",
    "TorchCommunicator": "communicator",
    "TorchDevice": "device",
    "TorchFetch": "device",
    "TorchKVPool": "kv_pool",
    "TorchOps": "ops",
    "allocator_memory": "allocator",
    "allocator_peak": "allocator",
    "row_counts": "ladder",
    "torch_dtype": "tensors",
}
"""Where each name stands."""


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
