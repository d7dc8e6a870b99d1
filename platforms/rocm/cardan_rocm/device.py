"""A GPU of AMD's: the shared device, with AITER's attention and GEMM where it is installed.

It knows no model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cardan.platform import AttentionBackend, DeviceInfo, LinearMethod, PackedWeight
from cardan.types import KVLayout
from cardan_rocm.aiter_limits import ARCHS, has_aiter
from cardan_rocm.features import NVIDIA_FORMATS, float8_form
from cardan_torch.gpu.accelerator import Accelerator
from cardan_torch.gpu.device import GpuDevice, GpuSettings
from cardan_torch.gpu.kv_pool import GpuKVPool
from cardan_torch.gpu.linears import CodedLinear, GpuDenseLinear, GpuDenseWeight, ScaledLinear
from cardan_torch.gpu.settings import INVARIANT, TOP_BUCKET
from cardan_torch.gpu.triton_attention import TritonAttention

FLOAT8_FORMS = {"fn": torch.float8_e4m3fn, "fnuz": torch.float8_e4m3fnuz, None: None}
FLOAT8_KV = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Of keys and values the kernels know every form on every chip, so that all platforms round them alike."""


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
        super().__init__(info, accelerator, rocm_linears(accelerator), settings)

    def attention_makers(self) -> Mapping[str, Callable[[GpuKVPool, KVLayout, str], AttentionBackend]]:
        """Triton, and AITER where it is installed and knows the chip."""
        makers = dict(super().attention_makers())
        if has_aiter() and self.accelerator.chip.arch in ARCHS:
            makers["aiter"] = self._aiter
        return makers

    def _aiter(self, pool: GpuKVPool, layout: KVLayout, dtype: str) -> AttentionBackend:
        from cardan_rocm.aiter_attention import AiterAttention

        triton = TritonAttention(self.accelerator, pool, deterministic=self.settings.deterministic)
        return AiterAttention(self.accelerator, pool, layout, dtype, triton)
