"""What a check is, and the two ways in which it can end other than well.

It knows no platform and no part of the suite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cardan.ops.definitions import NumpyArray

if TYPE_CHECKING:
    from cardan.testing.conformance.subject import Subject


class CheckError(AssertionError):
    """A check does not hold; the message says what was got and what was expected."""


class NotApplicableError(Exception):
    """A check does not apply to a platform; the message is the reason, which the report shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that a platform has to get right.

    Attributes:
        part: of the suite, one of ``PARTS``.
        name: within the part; it names the place of the fault that the check finds.
        run: raises ``CheckError`` where it does not hold, ``NotApplicableError`` where it does not apply.
        needs_ops: it applies to devices that supply an ops table only (level 2).
    """

    part: str
    name: str
    run: Callable[[Subject], None]
    needs_ops: bool = True

    @property
    def id(self) -> str:
        """``part/name``."""
        return f"{self.part}/{self.name}"


def expect(holds: bool, message: str) -> None:
    """Fail with ``message`` unless ``holds``.

    Raises:
        CheckError: it does not hold.
    """
    if not holds:
        raise CheckError(message)


def expect_close(got: NumpyArray, want: NumpyArray, tolerance: float, what: str) -> None:
    """Compare with a reference; the error is the largest difference over the largest size in its row.

    Raises:
        CheckError: shapes differ, there are NaNs, or the error exceeds ``tolerance``.
    """
    expect(got.shape == want.shape, f"{what}: the shape is {list(got.shape)}, expected {list(want.shape)}")
    broken = int(np.isnan(got).any(axis=-1).sum()) if got.size else 0
    expect(broken == 0, f"{what}: {broken} of {len(got)} rows hold NaN")
    size = np.maximum(np.abs(want).max(axis=-1, initial=0.0), 1e-30)
    errors = np.abs(got - want).max(axis=-1, initial=0.0) / size
    worst = int(errors.argmax()) if errors.size else 0
    error = float(errors.flat[worst]) if errors.size else 0.0
    expect(
        error <= tolerance, f"{what}: row {worst} is off by {error:.2e} of its largest value, expected {tolerance:.2e}"
    )
