"""Tries one operation of any ops table on its spec's cases and measures how far it is from the reference.

It knows no platform and decides nothing: callers compare the error with ``OpSpec.tolerance``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from cardan.ops.definitions import NumpyArray
from cardan.ops.opspec import Input, OpSpec, Role
from cardan.ops.reference import DenseWeight
from cardan.ops.table import Ops

Pack: TypeAlias = Callable[[NumpyArray, NumpyArray | None, str], Any]
"""Packs ``(values: [out, in], bias: [out] or None, dtype)`` for the platform's ``linear`` and ``embed``."""


def round_to(values: NumpyArray, dtype: str) -> NumpyArray:
    """``values`` rounded to a float type, to nearest even, and given back in float64."""
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float64)
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values).astype(np.float64)


def run_case(
    ops: Ops, spec: OpSpec, arguments: tuple[Any, ...], dtype: str, pack: Pack
) -> tuple[tuple[NumpyArray, ...], tuple[NumpyArray, ...]]:
    """What an ops table computes for one case, and what the reference does; both as numpy results."""
    exact = tuple(_rounded(argument, item, dtype) for argument, item in zip(arguments, spec.inputs, strict=True))
    placed = tuple(_placed(ops, argument, item, dtype, pack) for argument, item in zip(exact, spec.inputs, strict=True))
    want = _results(spec.reference(*exact))
    call = spec.call(ops, *placed) if spec.call else getattr(ops, spec.name)(*placed)
    return tuple(ops.to_host(result) for result in _results(call)), want


def error_of(got: NumpyArray, want: NumpyArray) -> float:
    """Largest difference over the largest size in its row; infinite where shapes or infinities differ.

    Integers and booleans are 0 when equal, else infinite.
    """
    if got.shape != want.shape:
        return float("inf")
    if not np.issubdtype(want.dtype, np.floating):
        return 0.0 if np.array_equal(got, want) else float("inf")
    finite = np.isfinite(want)
    if not np.array_equal(np.where(finite, 0.0, want), np.where(np.isfinite(got), 0.0, got), equal_nan=True):
        return float("inf")
    difference = np.abs(np.where(finite, got.astype(np.float64) - np.where(finite, want, 0.0), 0.0))
    size = np.max(np.abs(np.where(finite, want, 0.0)), axis=-1, keepdims=True, initial=0.0)
    return float(np.max(difference / np.maximum(size, 1e-30), initial=0.0))


def _results(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _rounded(argument: Any, item: Input, dtype: str) -> Any:
    """The argument in float64, with values that the tried type can hold."""
    target = dtype if item.role in (Role.ACTIVATION, Role.PACKED) else "float32"
    if isinstance(argument, DenseWeight):
        bias = None if argument.bias is None else round_to(argument.bias, target)
        return DenseWeight(round_to(argument.values, target), bias)
    if isinstance(argument, list):
        return [_rounded(part, item, dtype) for part in argument]
    if isinstance(argument, np.ndarray) and np.issubdtype(argument.dtype, np.floating):
        return round_to(argument, target)
    return argument


def _placed(ops: Ops, argument: Any, item: Input, dtype: str, pack: Pack) -> Any:
    """The argument as the operation takes it."""
    if isinstance(argument, DenseWeight):
        return pack(argument.values, argument.bias, dtype)
    if isinstance(argument, list):
        return [_placed(ops, part, item, dtype, pack) for part in argument]
    if not isinstance(argument, np.ndarray):
        return argument
    floating = np.issubdtype(argument.dtype, np.floating)
    if item.role is Role.HOST:
        return argument.astype(np.float32) if floating else argument
    if floating:
        narrow = argument if dtype == "float64" else argument.astype(np.float32)
        return ops.from_host(narrow, dtype if item.role is Role.ACTIVATION else "float32")
    return ops.from_host(argument)
