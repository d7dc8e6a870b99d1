"""The ROCm platform: what each kind of chip can do, which libraries it uses, and opening the device.

It imports torch and libraries only where a device is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cardan.platform import Capability, DeviceInfo, ModelFacts, OpsDevice, Recommendation
from cardan_rocm.aiter_limits import AITER, has_aiter, why_not_aiter
from cardan_rocm.features import rocm_features, slow_heads
from cardan_torch.gpu.platform import GpuPlatform
from cardan_torch.gpu.presence import AMD

if TYPE_CHECKING:
    from cardan_torch.gpu.accelerator import Accelerator


class RocmPlatform(GpuPlatform):
    """AMD's GPUs."""

    name = "rocm"
    vendor = AMD
    library = AITER.name
    emulated_arch = "gfx950"

    def features(self, arch: str) -> dict[str, Capability]:
        """See ``GpuPlatform.features``."""
        return rocm_features(arch, has_aiter=has_aiter())

    def why_not_library(self, facts: ModelFacts, arch: str) -> str | None:
        """See ``GpuPlatform.why_not_library``."""
        return why_not_aiter(facts, arch, has_aiter())

    def recommended_attention(self, facts: ModelFacts, arch: str) -> Recommendation:
        """See ``GpuPlatform.recommended_attention``; it also says where heads are wider than suits a chip."""
        found = super().recommended_attention(facts, arch)
        return replace(found, why=found.why + slow_heads(facts, arch)) if found.value == "triton" else found

    def make_device(self, device: DeviceInfo, accelerator: Accelerator, options: Mapping[str, Any]) -> OpsDevice:
        """See ``GpuPlatform.make_device``."""
        from cardan_rocm.device import RocmDevice

        return RocmDevice(device, accelerator, options)


platform = RocmPlatform()
