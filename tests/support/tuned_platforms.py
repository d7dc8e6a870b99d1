"""A tuner that measures nothing for real, and the platform without hardware with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cardan.platform import DeviceInfo, Tunable, TunedLinear, Tuner, TuningProgress
from cardan.testing.null_platform import NullPlatform

TUNABLES = (
    Tunable(name="few", default=4, least=0, most=64, help="rows up to which the kernel for few is taken"),
    Tunable(name="many", default=16, least=1, most=1024, help="rows from which on the kernel for many is taken"),
)


class FakeTuner(Tuner):
    """Gives the numbers that it was made with, and remembers with which linears."""

    def __init__(
        self, results: Mapping[str, int], processor: str = "Some CPU (2 threads)", kernels: str = "k1"
    ) -> None:
        self._processor, self._kernels, self.results = processor, kernels, results
        self.linears: Sequence[TunedLinear] = ()

    @property
    def processor(self) -> str:
        return self._processor

    @property
    def kernels(self) -> str:
        return self._kernels

    def tunables(self) -> tuple[Tunable, ...]:
        return TUNABLES

    def measure(self, linears: Sequence[TunedLinear], progress: TuningProgress) -> Mapping[str, int]:
        self.linears = linears
        progress("measuring", 1, 1)
        return self.results


class TunedNull(NullPlatform):
    """The platform without hardware, with a tuner."""

    def __init__(self, tuner: Tuner | None) -> None:
        self._tuner = tuner
        self.numbers: Mapping[str, int] = {}

    def tuner(self, device: DeviceInfo) -> Tuner | None:
        return self._tuner

    def tuned(self, numbers: Mapping[str, int]) -> TunedNull:
        chosen = TunedNull(self._tuner)
        chosen.numbers = numbers
        return chosen

    def configured(self, options: Mapping[str, Any]) -> TunedNull:
        return self
