"""The CUDA platform: what each kind of chip can do, which libraries it uses, and opening the device.

It imports torch and libraries only where a device is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cardan.platform import Capability, DeviceInfo, ModelFacts, OpsDevice
from cardan_cuda.features import cuda_features
from cardan_cuda.flashinfer_limits import FLASHINFER, flashinfer_version, why_not_flashinfer
from cardan_torch.gpu.platform import GpuPlatform
from cardan_torch.gpu.presence import NVIDIA

if TYPE_CHECKING:
    from cardan_torch.gpu.accelerator import Accelerator


class CudaPlatform(GpuPlatform):
    """NVIDIA's GPUs."""

    name = "cuda"
    vendor = NVIDIA
    library = FLASHINFER.name
    emulated_arch = "sm_90"

    def features(self, arch: str) -> dict[str, Capability]:
        """See ``GpuPlatform.features``."""
        return cuda_features(arch, flashinfer_version())

    def why_not_library(self, facts: ModelFacts, arch: str) -> str | None:
        """See ``GpuPlatform.why_not_library``."""
        return why_not_flashinfer(facts, flashinfer_version())

    def make_device(self, device: DeviceInfo, accelerator: Accelerator, options: Mapping[str, Any]) -> OpsDevice:
        """See ``GpuPlatform.make_device``."""
        from cardan_cuda.device import CudaDevice

        return CudaDevice(device, accelerator, options)


platform = CudaPlatform()
