"""Stands in for a GPU where there is none: torch's CPU device, graphs as recorded calls, kernels interpreted.

It knows no model. It exists to prove the host code of GPU platforms, so it is stricter than a GPU: what would wait for
the device, or would read memory that has moved, raises.
"""

from cardan_torch.gpu.emulation.accelerator import EmulatedAccelerator
from cardan_torch.gpu.emulation.recording import launch
from cardan_torch.gpu.emulation.rules import RuleError, no_waiting

__all__ = ["EmulatedAccelerator", "RuleError", "launch", "no_waiting"]
