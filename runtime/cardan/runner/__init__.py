"""The neutral runner: loads a model onto a device that supplies ops, runs batches, samples tokens.

It imports no array library; ``open_device`` is the way in.
"""

from cardan.runner.device import NeutralDevice, NeutralModel, NeutralPool, largest_step, open_device
from cardan.runner.memory_formula import StepSizes, memory_formula
from cardan.runner.runner import NeutralRunner
from cardan.runner.sampler import Sampler

__all__ = [
    "NeutralDevice",
    "NeutralModel",
    "NeutralPool",
    "NeutralRunner",
    "Sampler",
    "StepSizes",
    "largest_step",
    "memory_formula",
    "open_device",
]
