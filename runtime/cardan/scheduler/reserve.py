"""How much room admission keeps for the output of running requests.

It knows numbers only.
"""

from __future__ import annotations

OUTPUT_CAP = 4096
"""Most output tokens of one request that admission looks ahead."""

INITIAL_RATIO = 0.7
LEAST_SHARE = 0.14
DECAY_STEPS = 600
RETRACT_STEPS = 20


class NewTokenRatio:
    """The share of the output still allowed that is reserved.

    It falls linearly with each decode step, since most requests stop before their limit; running out of room puts it
    up again.

    Attributes:
        value: the share as it is now.
    """

    __slots__ = ("_decay", "_initial", "_least", "value")

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(INITIAL_RATIO * conservativeness, 1.0)
        self._least = self._initial * LEAST_SHARE
        self._decay = (self._initial - self._least) / DECAY_STEPS
        self.value = self._initial

    def decay(self) -> None:
        """One decode step has been planned."""
        self.value = max(self.value - self._decay, self._least)

    def reset(self) -> None:
        """Nothing runs and nothing waits."""
        self.value = self._initial

    def raise_after_retraction(self, generated: int, allowed: int, count: int) -> None:
        """The pool was full.

        Args:
            generated: tokens that the surviving requests have generated.
            allowed: tokens that they may generate in all.
            count: how many they are.
        """
        self.value = min(1.0, (generated + RETRACT_STEPS * count) / (allowed + 1))
