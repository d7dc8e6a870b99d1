"""Codes to numbers inside kernels, exactly, by bits: conversions of integers are slow on GPUs.

It knows no layout. The numbers of ``CODING`` are those of ``cardan_kernels.linear.coding.Coding``. A code below 2^23
placed in the low bits of the float32 2^23 makes ``2^23 + code``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def low_values(packed, CODING: tl.constexpr, DTYPE: tl.constexpr):
    """The low halves of bytes."""
    return _nibble(packed & 15, CODING, DTYPE)


@triton.jit
def high_values(packed, CODING: tl.constexpr, DTYPE: tl.constexpr):
    """The high halves of bytes."""
    return _nibble((packed >> 4) & 15, CODING, DTYPE)


@triton.jit
def byte_values(packed, CODING: tl.constexpr, DTYPE: tl.constexpr):
    """Whole bytes: signed, unsigned, or floats of 8 bits."""
    if CODING == 3:
        value = _placed(packed ^ 128) - 8388736.0
    elif CODING == 4:
        value = _placed(packed) - 8388608.0
    else:
        # the bits of E4M3 in a half are 2^8 times too small, its numbers below the normal ones included
        wide = packed.to(tl.uint16)
        half = ((wide & 128) << 8) | ((wide & 127) << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return value.to(DTYPE)


@triton.jit
def _nibble(code, CODING: tl.constexpr, DTYPE: tl.constexpr):
    if CODING == 0:
        value = _placed(code) - 8388616.0
    elif CODING == 1:
        value = _placed(code) - 8388608.0
    else:
        wide = code.to(tl.int32)
        size = wide & 7
        exponent = tl.maximum(size >> 1, 1)
        size = tl.where(size < 2, size, (2 + (size & 1)) << (exponent - 1))
        value = _placed(tl.where(wide < 8, 16 + size, 16 - size)) - 8388624.0
    return value.to(DTYPE)


@triton.jit
def _placed(code):
    """``2^23 + code``, float32."""
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
