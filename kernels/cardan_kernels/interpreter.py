"""Makes Triton's interpreter, on which kernels run where there is no GPU, compute in bfloat16 as GPUs do.

It knows no kernel. As it comes, the interpreter cuts float32 off where it makes bfloat16 of it, and multiplies matrices
of bfloat16 as if their bit patterns were whole numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from cardan_kernels.launching import interpreted


def repair() -> None:
    """Put both right in this process; may be called again, and does nothing where kernels are compiled."""
    builder = interpreter.InterpreterBuilder
    if not interpreted() or getattr(builder, "rounds_bfloat16", False):
        return
    cast, dot = builder.cast_impl, builder.create_dot

    def rounded_cast(self: Any, src: Any, dst_type: Any) -> Any:
        pair = (src.dtype.scalar, dst_type.scalar)
        if pair == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(narrowed(src.data), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(widened(src.data), tl.float32)
        if tl.bfloat16 in pair and pair[0] != pair[1]:
            return rounded_cast(self, rounded_cast(self, src, tl.float32), dst_type)
        return cast(self, src, dst_type)

    def wide_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        wide = (
            interpreter.TensorHandle(widened(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x
            for x in (a, b)
        )
        return dot(self, *wide, *others)

    builder.cast_impl, builder.create_dot = rounded_cast, wide_dot
    builder.rounds_bfloat16 = True


def narrowed(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bit patterns, uint16, of float32 ``values`` rounded to bfloat16, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def widened(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What bit patterns of bfloat16, uint16, stand for, in float32."""
    wide: np.ndarray[Any, Any] = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide
