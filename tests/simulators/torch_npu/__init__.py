"""A stand-in for torch_npu where there is no Ascend NPU: documented calls with documented restrictions, on the CPU.

It is written from the public documentation alone and holds no line of torch_npu. It refuses what the documentation
refuses, computes in float32 at least, and says nothing about speed. A directory that holds it goes onto PYTHONPATH.
"""

import torch
from torch.utils import backend_registration

from torch_npu._attention import npu_fused_infer_attention_score
from torch_npu._device import Module
from torch_npu._distributed import register as _register_hccl
from torch_npu._layers import npu_add_rms_norm, npu_rms_norm, npu_rotary_mul, npu_scatter_nd_update_, npu_swiglu
from torch_npu._quantized import (
    get_npu_format,
    npu_convert_weight_to_int4pack,
    npu_dynamic_quant,
    npu_format_cast,
    npu_quant_matmul,
    npu_quantize,
    npu_weight_quant_batchmatmul,
)
from torch_npu._tensor import NpuTensor, dispatch
from torch_npu.version import __version__

npu = Module("torch.npu")

__all__ = [
    "NpuTensor",
    "__version__",
    "get_npu_format",
    "npu",
    "npu_add_rms_norm",
    "npu_convert_weight_to_int4pack",
    "npu_dynamic_quant",
    "npu_format_cast",
    "npu_fused_infer_attention_score",
    "npu_quant_matmul",
    "npu_quantize",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_scatter_nd_update_",
    "npu_swiglu",
    "npu_weight_quant_batchmatmul",
]


def _register() -> torch.library.Library:
    backend_registration._setup_privateuseone_for_python_backend("npu", npu)
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: dispatch(func, args, kwargs), "PrivateUse1")
    return library


_library = _register()
_register_hccl()
