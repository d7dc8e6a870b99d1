"""The ROCm platform: what each kind of chip can do, which libraries it uses, and opening the device.

It imports torch and libraries only where a device is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cardan.platform import Capability, DeviceInfo, ModelFacts, OpsDevice, Recommendation
from cardan_rocm.aiter_limits import has_aiter, why_not_aiter
from cardan_rocm.features import rocm_features
from cardan_torch.gpu.platform import GpuPlatform
from cardan_torch.gpu.presence import AMD

if TYPE_CHECKING:
    from cardan_torch.gpu.accelerator import Accelerator


class RocmPlatform(GpuPlatform):
    """AMD's GPUs."""

    name = "rocm"
    vendor = AMD
    emulated_arch = "gfx950"

    def features(self, arch: str) -> dict[str, Capability]:
        """See ``GpuPlatform.features``."""
        return rocm_features(arch, has_aiter=has_aiter())

    def recommended_attention(self, facts: ModelFacts, arch: str) -> Recommendation:
        """AITER where it is installed and takes the model's layers, else Triton."""
        reason = why_not_aiter(facts, arch, has_aiter())
        if reason is None:
            return Recommendation("aiter", "aiter is installed and takes all layers")
        return Recommendation("triton", reason)

    def make_device(self, device: DeviceInfo, accelerator: Accelerator, options: Mapping[str, Any]) -> OpsDevice:
        """See ``GpuPlatform.make_device``."""
        from cardan_rocm.device import RocmDevice

        return RocmDevice(device, accelerator, options)


platform = RocmPlatform()
