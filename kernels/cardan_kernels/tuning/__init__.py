"""Which configuration a kernel is launched with: data files, keyed by chip, operation and shape.

It knows no kernel: what the numbers mean is the kernel's affair.
"""

from cardan_kernels.tuning.choice import KernelConfig, choose, known_ops

__all__ = ["KernelConfig", "choose", "known_ops"]
