"""What an ``OpSpec`` is, and short ways to write down the inputs of an operation.

It knows no operation and no platform.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cardan.ops.bounds import Bound, exact
from cardan.ops.cases import Cases

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """What one operation means and how well a platform must compute it.

    Attributes:
        name: of the method of ``Ops``.
        inputs: its arguments in order.
        outputs: axes of each result; the last entry stands for all that follow.
        dtypes: float types that platforms may be tried in.
        reference: the meaning, on numpy arrays in float64.
        cases: makes the arguments it is tried on.
        bound: how far each element of the results may be off; by default values are moved and not rounded.
        composed: the same where a platform leaves the operation to the composition in ``Ops``, which rounds more
            often; None where that is no matter.
        call: how it is called, where that is not ``getattr(ops, name)(*arguments)``.
        covers: the methods that it tries; itself where empty.
    """

    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    dtypes: tuple[str, ...] = ACTIVATIONS
    reference: Callable[..., Any]
    cases: Cases
    bound: Bound = exact
    composed: Bound | None = None
    call: Callable[..., Any] | None = None
    covers: tuple[str, ...] = ()


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
