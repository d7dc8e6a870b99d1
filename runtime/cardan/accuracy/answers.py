"""What a platform makes of one request parameter: what it says of it, and how a test of it came out.

They know no engine; ``semantics`` measures them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LEAST_P = 1e-6
"""Counts that would come about by chance more rarely than this are a fault. Seeds are fixed and noise is a function of
them, so a right platform passes always or never."""
MOST = 1e9
"""Statistics are not written larger, so that none is infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request parameter on one platform.

    Attributes:
        name: of the parameter.
        support: ``native``, ``emulated`` or ``refused``.
        reason: the platform's own.
        draws: tokens that were drawn; 0 where there is no test.
        statistic: Pearson's, at most ``MOST``.
        freedom: its degrees of freedom.
        p: probability of a statistic as large by chance; None where there is no test.
        note: why it was not tried, or what was drawn that cannot be.
    """

    name: str
    support: str
    reason: str = ""
    draws: int = 0
    statistic: float = 0.0
    freedom: int = 0
    p: float | None = None
    note: str = ""

    @property
    def fails(self) -> bool:
        """Whether what was drawn is not what the parameter asks for."""
        return self.p is not None and self.p < LEAST_P

    def describe(self) -> str:
        """In a few words."""
        if self.p is None:
            return f"{self.support}{f'; {self.note}' if self.note else ''}"
        word = "drawn otherwise" if self.fails else "as it should"
        return f"{self.support}; {word}: chi-square {self.statistic:.3g} of {self.freedom}, p = {self.p:.2g}"


def read_answers(kept: Mapping[str, Any]) -> dict[str, Answer]:
    """Answers from what ``measure`` gave, by name.

    Raises:
        TypeError: fields are others than an answer's, or no numbers.
    """
    found = {name: Answer(**value) for name, value in kept.items()}
    for name, answer in found.items():
        numbers = (answer.draws, answer.statistic, answer.freedom, 0.0 if answer.p is None else answer.p)
        if not all(isinstance(number, (int, float)) for number in numbers):
            raise TypeError(f"what is kept of {name} is {numbers!r}")
    return found


def failures(answers: Mapping[str, Answer], who: str) -> list[str]:
    """One reason for each parameter that is not honoured."""
    return [
        f"{name} is not honoured by {who}: {answer.draws} draws from known logits give a chi-square of "
        f"{answer.statistic:.3g} with {answer.freedom} degrees of freedom (p = {answer.p:.2g})"
        f"{f'; {answer.note}' if answer.note else ''}"
        for name, answer in answers.items()
        if answer.fails
    ]
