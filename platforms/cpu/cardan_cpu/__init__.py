"""The CPU platform of Cardan; importing it does not import torch."""

from cardan_cpu.cpu_platform import CpuPlatform, platform

__all__ = ["CpuPlatform", "platform"]
