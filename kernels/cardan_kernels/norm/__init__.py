"""Normalizations.

They know no model.
"""

from cardan_kernels.norm.rms import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
