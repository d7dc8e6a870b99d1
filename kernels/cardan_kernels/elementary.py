"""Elementary functions of float32 inside kernels, good to a few roundings also where the usual formula is not.

They know no kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALL = tl.constexpr(0.6)
"""Below this the quotient of exponentials loses digits to the difference of nearly equal numbers."""


@triton.jit
def tanh(x):
    """Hyperbolic tangent; NaN stays NaN.

    Near 0 it is a continued fraction, cut off at its fifth term, and elsewhere of exponentials.
    The fraction is off by less than ``x^11 / 9.8e6``, which below ``SMALL`` is less than a hundredth of a rounding.

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", 4.5.70.
    """
    size = tl.abs(x)
    square = x * x
    near = x * (945.0 + square * (105.0 + square)) / (945.0 + square * (420.0 + square * 15.0))
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(size, 20.0)) + 1.0)
    return tl.where(size >= SMALL, tl.where(x < 0, -far, far), near)
