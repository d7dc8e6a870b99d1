"""What every torch device shares: eager ops, dense linears, KV pool and attention over slots.

It knows no kind of hardware; platforms derive their devices from ``TorchDevice``. Importing it imports no torch: a
platform is asked whether it can run before anything of it is needed, and torch takes seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cardan_torch.attention import TorchAttention
    from cardan_torch.device import ATTENTION_BACKENDS, TorchDevice, TorchFetch
    from cardan_torch.kv_pool import TorchKVPool
    from cardan_torch.linear import DenseLinear, DenseWeight
    from cardan_torch.ops import TorchOps
    from cardan_torch.tensors import DENSE_FORMATS, torch_dtype

__all__ = [
    "ATTENTION_BACKENDS",
    "DENSE_FORMATS",
    "DenseLinear",
    "DenseWeight",
    "TorchAttention",
    "TorchDevice",
    "TorchFetch",
    "TorchKVPool",
    "TorchOps",
    "torch_dtype",
]

_MODULES = {
    "ATTENTION_BACKENDS": "device",
    "DENSE_FORMATS": "tensors",
    "DenseLinear": "linear",
    "DenseWeight": "linear",
    "TorchAttention": "attention",
    "TorchDevice": "device",
    "TorchFetch": "device",
    "TorchKVPool": "kv_pool",
    "TorchOps": "ops",
    "torch_dtype": "tensors",
}
"""Where each name stands."""


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
