"""The Ascend NPU platform of Cardan; importing it imports neither torch nor torch_npu."""

from cardan_npu.npu_platform import NpuPlatform, platform

__all__ = ["NpuPlatform", "platform"]
