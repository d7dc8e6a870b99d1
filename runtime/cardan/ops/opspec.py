"""What an ``OpSpec`` is, and short ways to write down the inputs of an operation.

It knows no operation and no platform.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cardan.ops.cases import Cases

ROUNDOFF: Mapping[str, float] = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
}
"""Largest relative error of rounding to each float type."""

ACTIVATIONS = ("float32", "bfloat16", "float16")
FLOAT32 = ("float32",)


class Role(enum.Enum):
    """What an argument is.

    ``ACTIVATION`` has the tried type, ``FLOAT32`` always that; ``INDEX`` is int32; ``PACKED`` is a weight; ``HOST``
    stays in numpy; ``VALUE`` is a Python value.
    """

    ACTIVATION = "activation"
    FLOAT32 = "float32"
    INDEX = "index"
    BOOL = "bool"
    PACKED = "packed"
    HOST = "host"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Input:
    """One argument of an operation.

    Attributes:
        name: as in the signature of ``Ops``.
        axes: names of its axes, ``...`` for any number; empty for values.
        role: what it is.
    """

    name: str
    axes: str
    role: Role


class Precision(enum.Enum):
    """How many roundings of the output's type an operation may be off by, relative to the largest of a row.

    ``EXACT`` moves values, ``ROUNDED`` rounds a result and one intermediate, ``COMPUTED`` has a function of the library
    in it and a few steps around that. ``REDUCED`` adds up a row: terms of one sign that are added in runs of at most
    100 and the runs in a tree are off by at most 100 + log2(runs) roundings of the sum, whatever the row's length, so
    that a plain loop over a whole vocabulary, which is off by as many as it has entries, does not pass.
    """

    EXACT = 0
    ROUNDED = 2
    COMPUTED = 16
    REDUCED = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """What one operation means and how well a platform must compute it.

    Attributes:
        name: of the method of ``Ops``.
        inputs: its arguments in order.
        outputs: axes of each result; the last entry stands for all that follow.
        dtypes: float types that platforms may be tried in.
        reference: the meaning, on numpy arrays in float64.
        precision: what bounds the error.
        cases: makes the arguments it is tried on.
        call: how it is called, where that is not ``getattr(ops, name)(*arguments)``.
        covers: the methods that it tries; itself where empty.
    """

    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    dtypes: tuple[str, ...] = ACTIVATIONS
    reference: Callable[..., Any]
    precision: Precision
    cases: Cases
    call: Callable[..., Any] | None = None
    covers: tuple[str, ...] = ()

    def tolerance(self, dtype: str) -> float:
        """Largest error of an element over the largest size in its row.

        Sums are kept in float32 at least, so that narrow types are off by a few of their own roundings only.
        """
        roundings = self.precision.value
        narrow = ROUNDOFF[dtype] > ROUNDOFF["float32"]
        return (min(roundings, 4) if narrow else roundings) * ROUNDOFF[dtype]


def activation(name: str, axes: str) -> Input:
    """An array of the tried type."""
    return Input(name, axes, Role.ACTIVATION)


def float32(name: str, axes: str) -> Input:
    """An array of float32."""
    return Input(name, axes, Role.FLOAT32)


def index(name: str, axes: str) -> Input:
    """An array of int32."""
    return Input(name, axes, Role.INDEX)


def packed(name: str) -> Input:
    """A packed weight."""
    return Input(name, "out in", Role.PACKED)


def values(*names: str) -> tuple[Input, ...]:
    """Python values."""
    return tuple(Input(name, "", Role.VALUE) for name in names)
