"""How far what a KV pool of 8 bits keeps may be from what was written: half a step of what each type stores.

It knows no pool. Source of the floats: OCP 8-bit Floating Point Specification (OFP8), revision 1.0, tables 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cardan.ops.definitions import NumpyArray
from cardan.ops.rounding import ROUNDOFF

FRACTION_BITS: Mapping[str, int] = {"fp8_e4m3": 3, "fp8_e5m2": 2}
LEAST_EXPONENT: Mapping[str, int] = {"fp8_e4m3": -6, "fp8_e5m2": -14}
"""Of the smallest normal number; below it the step does not shrink."""

LARGEST_CODE = 127
"""Of int8, for the largest size of a head."""

CODED = ("int8", *FRACTION_BITS)
"""KV types that keep less than any type of activations."""


def kept_off(values: NumpyArray, kv_dtype: str, scale: float = 1.0) -> NumpyArray:
    """How far each of ``values: [tokens, heads, dim]`` may be off once it was kept; 0 for types that keep it.

    Floats of 8 bits hold values divided by ``scale``, which must be small enough for the type; a quotient by another
    scale than 1 is off by two roundings of float32, and so is what comes back. That holds for the quotients too that
    become codes of int8, which have scales of their own.
    """
    sizes = np.abs(values)
    if kv_dtype in FRACTION_BITS:
        exponents = np.floor(np.log2(np.maximum(sizes / scale, 2.0 ** LEAST_EXPONENT[kv_dtype])))
        half: NumpyArray = np.exp2(exponents - FRACTION_BITS[kv_dtype] - 1)
        return half if scale == 1.0 else scale * half + 4 * ROUNDOFF["float32"] * sizes
    if kv_dtype == "int8":
        largest = sizes.max(axis=-1, keepdims=True)
        steps: NumpyArray = np.broadcast_to(largest * (0.5 / LARGEST_CODE + 4 * ROUNDOFF["float32"]), sizes.shape)
        return steps
    return np.zeros_like(sizes)
