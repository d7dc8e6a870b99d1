"""What a check is, and the two ways in which it can end other than well.

It knows no platform and no part of the suite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
