"""What a platform lets its user tune: whole numbers by which its kernels choose, and how they are measured.

It knows no platform and no kernel. Nothing is measured at a start, so that two starts give the same tokens:
``cardan tune`` measures, and what it wrote down is read again (``cardan.platform.tuned_tables``).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cardan.platform.ops_device import LinearSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """One number that kernels choose by.

    Attributes:
        name: unique on the platform, and the same in every version of it.
        default: what holds where nobody measured.
        least: smallest value that kernels take.
        most: largest value that kernels take.
        help: one line: what changes at this number, and its unit.
    """

    name: str
    default: int
    least: int
    most: int
    help: str


@dataclass(frozen=True, slots=True)
class TunedLinear:
    """A linear to measure with.

    Attributes:
        fmt: format of its weight.
        spec: its sizes, and the type of its activations.
    """

    fmt: str
    spec: LinearSpec


TuningProgress = Callable[[str, int, int], None]
"""Called with what is measured, how many measurements are done, and how many there are."""


class Tuner(abc.ABC):
    """What can be tuned on one device, and how.

    Measurements hold for a processor and a version of the kernels: a table of others is not used.
    """

    @property
    @abc.abstractmethod
    def processor(self) -> str:
        """The processor, and what else of the machine or the options measurements depend on, such as threads."""

    @property
    @abc.abstractmethod
    def kernels(self) -> str:
        """The kernels and their version; it changes whenever they do."""

    @abc.abstractmethod
    def tunables(self) -> tuple[Tunable, ...]:
        """Every number that can be measured."""

    @abc.abstractmethod
    def measure(self, linears: Sequence[TunedLinear], progress: TuningProgress) -> Mapping[str, int]:
        """Measure, and return the best values by name.

        Args:
            linears: those of a model, whose numbers alone are measured; empty for all numbers, with sizes that the
                platform chooses.
            progress: told how far it is.
        """
