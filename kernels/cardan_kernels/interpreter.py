"""Makes Triton's interpreter, on which kernels run where there is no GPU, compute in bfloat16 as GPUs do, and sooner.

It knows no kernel. As it comes, the interpreter cuts float32 off where it makes bfloat16 of it, multiplies matrices
of bfloat16 as if their bit patterns were whole numbers, and puts its operations into ``triton.language`` anew for each
call of a function within a kernel, which takes longer than most such functions. For each sum and product of whole
numbers it works out by a dozen operations whether they overflow, and uses the answer only where it debugs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from cardan_kernels.launching import interpreted

_LANGUAGE = (tl, tl.core)
_in_place: set[int] = set()
"""Modules of ``_LANGUAGE`` that hold the interpreter's operations since the kernel that runs was launched."""


def repair() -> None:
    """Put all of it right in this process; may be called again, and does nothing where kernels are compiled."""
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
    interpreter.GridExecutor.__call__ = _launching(interpreter.GridExecutor.__call__)
    interpreter.InterpretedFunction.__call__ = _called_within(interpreter.InterpretedFunction.__call__)
    semantic = interpreter.interpreter_semantic
    semantic.binary_op_sanitize_overflow_impl = _overflow_check(semantic.binary_op_sanitize_overflow_impl)


def _launching(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Launch a kernel, at whose end its operations are taken out of the language again."""

    @functools.wraps(launch)
    def anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        _in_place.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            _in_place.clear()

    return anew


def _called_within(call: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function of a kernel; only the first call since a launch puts operations into the modules that it sees."""

    @functools.wraps(call)
    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen = _modules_seen(self.fn)
        if not seen <= _in_place:
            result = call(self, *args, **kwargs)
            _in_place.update(seen)
            return result
        return self.rewrite()(*args, **kwargs)

    return once


def _overflow_check(check: Callable[..., None]) -> Callable[..., None]:
    """Work out whether whole numbers overflow only where the answer is used."""

    @functools.wraps(check)
    def checked(*operation: Any) -> None:
        if interpreter.interpreter_builder.options.debug:
            check(*operation)

    return checked


@functools.cache
def _modules_seen(function: Callable[..., Any]) -> frozenset[int]:
    """Which modules of the language a function's own module names."""
    named = [id(value) for value in function.__globals__.values()]
    return frozenset(id(module) for module in _LANGUAGE if id(module) in named)


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
