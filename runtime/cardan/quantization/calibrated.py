"""Weights whose checkpoint says how their linear's activations are rounded: by one step, from a calibration.

It knows no method of quantization and no GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cardan.types import TensorView


@dataclass(frozen=True, slots=True)
class ActivationStep:
    """How activations are rounded to int8: by one step for all tokens.

    Attributes:
        step: between neighbouring codes, positive.
        zero: the code of 0.
    """

    step: float
    zero: int


@dataclass(frozen=True, slots=True)
class CalibratedView(TensorView):
    """A tensor of ``rounded_format`` with a calibrated step; a platform may take that, or round less.

    Attributes:
        activations: the step.
    """

    activations: ActivationStep | None = field(default=None, compare=False)


def activation_step(view: TensorView) -> ActivationStep | None:
    """The calibrated step of a linear's activations, where its checkpoint has one."""
    return view.activations if isinstance(view, CalibratedView) else None
