"""A GPU of NVIDIA's: the shared device, with FlashInfer's attention where it is installed.

It knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cardan.platform import AttentionBackend, DeviceInfo, LinearMethod
from cardan.types import KVLayout
from cardan_cuda.features import has_float8
from cardan_cuda.flashinfer_limits import flashinfer_version
from cardan_torch.gpu.accelerator import Accelerator
from cardan_torch.gpu.device import GpuDevice, GpuSettings
from cardan_torch.gpu.kv_pool import GpuKVPool
from cardan_torch.gpu.linears import CodedLinear, GpuDenseLinear, ScaledLinear
from cardan_torch.gpu.settings import INVARIANT, TOP_BUCKET
from cardan_torch.gpu.triton_attention import TritonAttention

FLOAT8_KV = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


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
        """Open.

        Args:
            info: which it is.
            accelerator: open.
            options: of the platform.
        """
        settings = GpuSettings(
            top_bucket=int(options.get(TOP_BUCKET, 0)),
            deterministic=bool(options.get(INVARIANT, False)),
            float8_kv=FLOAT8_KV,
        )
        super().__init__(info, accelerator, cuda_linears(accelerator), settings)

    def attention_makers(self) -> Mapping[str, Callable[[GpuKVPool, KVLayout, str], AttentionBackend]]:
        """Triton, and FlashInfer where it is installed."""
        makers = dict(super().attention_makers())
        if flashinfer_version() is not None:
            makers["flashinfer"] = self._flashinfer
        return makers

    def _flashinfer(self, pool: GpuKVPool, layout: KVLayout, dtype: str) -> AttentionBackend:
        from cardan_cuda.flashinfer_attention import FlashInferAttention

        triton = TritonAttention(self.accelerator, pool, deterministic=self.settings.deterministic)
        return FlashInferAttention(self.accelerator, pool, layout, dtype, triton)
