"""Which weight formats torch_npu's products take.

It knows no product and imports no torch, so that the platform can answer without it.
"""

from __future__ import annotations

from cardan.quantization import AFFINE_GROUPS, AFFINE_SCALES, integer_format, rounded_format

DENSE_FORMATS = ("F32", "F16", "BF16")

W4_FORMATS = ("Q4_0", *(integer_format(4, group, scale) for group in AFFINE_GROUPS for scale in AFFINE_SCALES))
"""Codes of 4 bits, symmetric: W4A16."""

W8_FORMATS = ("Q8_0", *(integer_format(8, group, scale) for group in AFFINE_GROUPS for scale in AFFINE_SCALES))
"""Codes of 8 bits, symmetric: W8A16."""

ROUNDED_FORMATS = tuple(rounded_format(group) for group in AFFINE_GROUPS)
"""Codes of 8 bits whose linears round activations by token: W8A8 dynamic."""
