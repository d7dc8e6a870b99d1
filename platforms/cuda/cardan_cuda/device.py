"""A GPU of NVIDIA's: the shared device, with FlashInfer's attention where it is installed.

It knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cardan.platform import DeviceInfo, LinearMethod
from cardan_cuda.features import has_float8
from cardan_cuda.flashinfer_limits import flashinfer_version
from cardan_torch import LibraryAttention
from cardan_torch.gpu.accelerator import Accelerator
from cardan_torch.gpu.device import GpuDevice
from cardan_torch.gpu.linears import CodedLinear, GpuDenseLinear, ScaledLinear


def cuda_linears(accelerator: Accelerator) -> tuple[LinearMethod, ...]:
    """Codes on both sides, codes of weights, dense weights."""
    device, found = accelerator.device, has_float8(accelerator.chip.arch)
    return (
        ScaledLinear(device, torch.float8_e4m3fn if found else None, torch_gemm=found and accelerator.compiles),
        CodedLinear(device),
        GpuDenseLinear(device),
    )


class CudaDevice(GpuDevice):
    """One GPU, or the stand-in for one."""

    def __init__(self, info: DeviceInfo, accelerator: Accelerator, options: Mapping[str, Any]) -> None:
        """See ``GpuDevice``."""
        super().__init__(info, accelerator, cuda_linears(accelerator), options)

    def library_attention(self) -> type[LibraryAttention[Any]] | None:
        """FlashInfer's, where it is installed."""
        if flashinfer_version() is None:
            return None
        from cardan_cuda.flashinfer_attention import FlashInferAttention

        return FlashInferAttention
