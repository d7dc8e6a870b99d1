"""A GPU of AMD's: the shared device, with AITER's attention and GEMM where it is installed.

It knows no model.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from cardan.platform import DeviceInfo, LinearMethod, PackedWeight
from cardan_rocm.aiter_limits import ARCHS, has_aiter
from cardan_rocm.features import NVIDIA_FORMATS, float8_form
from cardan_torch import LibraryAttention
from cardan_torch.gpu.accelerator import Accelerator
from cardan_torch.gpu.device import GpuDevice
from cardan_torch.gpu.linears import CodedLinear, GpuDenseLinear, GpuDenseWeight, ScaledLinear

FLOAT8_FORMS = {"fn": torch.float8_e4m3fn, "fnuz": torch.float8_e4m3fnuz, None: None}


class AiterWeight(GpuDenseWeight):
    """A dense weight that AITER's tuned GEMM multiplies."""

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight.apply``."""
        library = importlib.import_module("aiter.tuned_gemm")
        out: torch.Tensor = library.tgemm.mm(x, self.weight, self.bias)
        return out


class AiterDenseLinear(GpuDenseLinear):
    """AITER's GEMM for weights of 16 bits, torch's for others."""

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """See ``DenseLinear.make``."""
        narrow = weight.dtype in (torch.bfloat16, torch.float16)
        return AiterWeight(weight, bias) if narrow else GpuDenseWeight(weight, bias)


def rocm_linears(accelerator: Accelerator) -> tuple[LinearMethod, ...]:
    """Codes on both sides, codes of weights, dense weights."""
    device, arch = accelerator.device, accelerator.chip.arch
    float8 = FLOAT8_FORMS[float8_form(arch)]
    dense = AiterDenseLinear if has_aiter() and arch in ARCHS else GpuDenseLinear
    return (
        ScaledLinear(device, float8, torch_gemm=float8 is not None and accelerator.compiles),
        CodedLinear(device, refused=frozenset(NVIDIA_FORMATS)),
        dense(device),
    )


class RocmDevice(GpuDevice):
    """One GPU, or the stand-in for one."""

    def __init__(self, info: DeviceInfo, accelerator: Accelerator, options: Mapping[str, Any]) -> None:
        """See ``GpuDevice``."""
        super().__init__(info, accelerator, rocm_linears(accelerator), options)

    def library_attention(self) -> type[LibraryAttention[Any]] | None:
        """AITER's, where it is installed and knows the chip."""
        if not has_aiter() or self.accelerator.chip.arch not in ARCHS:
            return None
        from cardan_rocm.aiter_attention import AiterAttention

        return AiterAttention
