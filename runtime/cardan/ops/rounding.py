"""How far float types round, and how far many roundings get together.

They know no operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from cardan.ops.definitions import NumpyArray

ROUNDOFF: Mapping[str, float] = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
}
"""Largest relative error of rounding to each float type."""

SMALLEST: Mapping[str, float] = {
    "float64": 2.0**-1022,
    "float32": 2.0**-126,
    "bfloat16": 2.0**-126,
    "float16": 2.0**-25,
}
"""Largest absolute error of rounding where the relative one does not hold: devices may flush what is below the
smallest normal number to 0, but for float16, whose subnormal numbers are of use."""

CHANCE = 1e-9
"""Of a correct platform to exceed a probabilistic bound in any result of one comparison."""


def spread_factor(results: int) -> float:
    """λ: how many times its spread none of so many sums of independent roundings exceeds, but with ``CHANCE``."""
    return math.sqrt(2 * math.log(2 * max(results, 1) / CHANCE))


def gamma(terms: int, results: int, roundoff: float = ROUNDOFF["float32"]) -> float:
    """What a sum of ``terms`` terms may be off by, relative to the sum of their sizes: ``min(n, λ √n)`` roundings.

    Args:
        terms: added up, in any order.
        results: sums that are compared.
        roundoff: of the type that they are added up in.

    Source: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019, theorem 2.4.
    """
    return min(float(terms), spread_factor(results) * math.sqrt(terms)) * roundoff


def round_to(values: NumpyArray, dtype: str) -> NumpyArray:
    """``values`` rounded to a float type, to nearest even, and given back in float64."""
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float64)
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values).astype(np.float64)
