"""Tries one operation of any ops table on its spec's cases and measures how far it is from the reference.

It knows no platform and decides nothing: callers look at a trial's excess over what its spec allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from cardan.ops.bounds import Allowed, Bound, Tried, at_most
from cardan.ops.definitions import NumpyArray
from cardan.ops.opspec import Input, OpSpec, Role
from cardan.ops.reference import DenseWeight
from cardan.ops.rounding import round_to
from cardan.ops.table import Ops

Pack: TypeAlias = Callable[[NumpyArray, NumpyArray | None, str], Any]
"""Packs ``(values: [out, in], bias: [out] or None, dtype)`` for the platform's ``linear`` and ``embed``."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one case.

    Attributes:
        got: results of the ops table.
        want: results of the reference.
        allowed: how far each element of the latter may be off.
    """

    got: tuple[NumpyArray, ...]
    want: tuple[NumpyArray, ...]
    allowed: tuple[Allowed, ...]

    @property
    def excesses(self) -> tuple[float, ...]:
        """For each result the largest difference over what is allowed: up to 1 is fine."""
        return tuple(at_most(*parts) for parts in zip(self.got, self.want, self.allowed, strict=True))

    @property
    def excess(self) -> float:
        """The largest of all; infinite where the number of results differs."""
        return max(self.excesses) if len(self.got) == len(self.want) else math.inf


def run_case(ops: Ops, spec: OpSpec, arguments: tuple[Any, ...], dtype: str, pack: Pack) -> Trial:
    """What an ops table computes for one case, and what the reference does; both as numpy results."""
    exact = tuple(_rounded(argument, item, dtype) for argument, item in zip(arguments, spec.inputs, strict=True))
    placed = tuple(_placed(ops, argument, item, dtype, pack) for argument, item in zip(exact, spec.inputs, strict=True))
    want = _results(spec.reference(*exact))
    call = spec.call(ops, *placed) if spec.call else getattr(ops, spec.name)(*placed)
    allowed = _bound(spec, ops)(Tried(exact, want, dtype))
    allowed += allowed[-1:] * (len(want) - len(allowed))
    return Trial(tuple(ops.to_host(result) for result in _results(call)), want, allowed)


def _bound(spec: OpSpec, ops: Ops) -> Bound:
    """What holds for this table: less where it leaves the operation to the composition that every table has."""
    left = spec.composed is not None and getattr(type(ops), spec.name) is getattr(Ops, spec.name)
    return spec.composed if left and spec.composed is not None else spec.bound


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
