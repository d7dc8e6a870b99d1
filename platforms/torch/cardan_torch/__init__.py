"""What every torch device shares: eager ops, dense linears, KV pool and attention over slots.

It knows no kind of hardware; platforms derive their devices from ``TorchDevice``.
"""

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
