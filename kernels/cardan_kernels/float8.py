"""Floats of 8 bits inside kernels, taken apart and put together by whole-number arithmetic.

They know no kernel. Formats are those of ``cardan_kernels.kv_formats``, by their codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3FN = tl.constexpr(1)
E4M3FNUZ = tl.constexpr(2)
E5M2 = tl.constexpr(3)


@triton.jit
def decode(codes, FORMAT: tl.constexpr):
    """Float16 of ``codes: uint8``, smaller than the true values by the format's ``unit``; NaN is not kept.

    Exponent and fraction move to where float16 has its lowest bits of the exponent and its highest of the fraction,
    so that numbers below the smallest normal one come out right, too.
    """
    wide = codes.to(tl.uint16)
    if FORMAT == E5M2:  # noqa: SIM108 (decided while compiling)
        bits = wide << 8
    else:
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def encode(values, FORMAT: tl.constexpr):
    """Codes, uint8, of ``values: float32``, rounded to nearest even; too large ones become the largest, NaN stays.

    Below the smallest normal number, adding a power of two whose last bit is the format's smallest step rounds to
    whole steps.
    """
    FRACTION: tl.constexpr = 2 if FORMAT == E5M2 else 3
    BIAS: tl.constexpr = 15 if FORMAT == E5M2 else (7 if FORMAT == E4M3FN else 8)
    LARGEST: tl.constexpr = 57344.0 if FORMAT == E5M2 else (448.0 if FORMAT == E4M3FN else 240.0)
    SHIFT: tl.constexpr = 23 - FRACTION
    STEPS: tl.constexpr = 2.0 ** (24 - BIAS - FRACTION)
    FIRST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    size = tl.minimum(tl.abs(values), LARGEST)
    bits = size.to(tl.uint32, bitcast=True)
    halfway: tl.constexpr = (1 << (SHIFT - 1)) - 1
    normal = ((bits + halfway + ((bits >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << FRACTION)
    small = (size + STEPS).to(tl.uint32, bitcast=True) & 0xFF
    codes = tl.where(size < FIRST_NORMAL, small, normal)
    negative = values.to(tl.uint32, bitcast=True) >> 31
    if FORMAT == E4M3FNUZ:
        codes = tl.where(codes == 0, 0, codes | (negative << 7))
        codes = tl.where(values != values, 0x80, codes)
    else:
        codes = codes | (negative << 7)
        codes = tl.where(values != values, 0x7F, codes)
    return codes.to(tl.uint8)
