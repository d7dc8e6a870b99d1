"""Gated activations.

They know no model.
"""

from cardan_kernels.activation.gates import gelu_mul, silu_mul

__all__ = ["gelu_mul", "silu_mul"]
