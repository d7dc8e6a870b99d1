"""The stand-in for a GPU: one stream that runs at once, another that runs as late as it may, graphs as recordings.

It knows no model. Copies to the host are made only when they are waited for: whatever a later step overwrites of a
result that was not copied first shows as a wrong result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from cardan.errors import ConfigError
from cardan.platform import Fetch, Memory, host_memory
from cardan_torch.gpu.accelerator import Accelerator, CapturedWork, ChipFacts, Run, staging_copy
from cardan_torch.gpu.emulation.recording import Recording
from cardan_torch.gpu.emulation.rules import RuleError, lifted

UNITS = 4
"""Few, so that attention over short sequences is still split among several."""

TOTAL_MEMORY = 64 * 2**30


class EmulatedAccelerator(Accelerator):
    """torch's CPU device in a GPU's place; kernels must run in Triton's interpreter."""

    compiles = False
    collectives = "gloo"

    def __init__(self, arch: str) -> None:
        """Stand in for a chip.

        Args:
            arch: that capabilities answer for, such as ``sm_90``.

        Raises:
            ConfigError: kernels are not interpreted in this process.
        """
        require_interpreter()
        _repair_interpreter()
        self.device = torch.device("cpu")
        self.chip = ChipFacts(
            name=f"stand-in for {arch}", arch=arch, units=UNITS, total_memory=TOTAL_MEMORY, runtime="interpreter"
        )
        self.captures = 0
        self._capturing = False

    def scope(self) -> AbstractContextManager[Any]:
        """No gradients, and infinities and NaN without warnings, as on a GPU; there is one device, it runs at once."""
        return self._scoped()

    @contextmanager
    def _scoped(self) -> Iterator[None]:
        with torch.inference_mode(), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
            yield

    def upload(self, array: np.ndarray[Any, Any], out: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Accelerator.upload``."""
        self._refuse("a copy from the host")
        with lifted():
            copy = torch.from_numpy(np.array(array, order="C"))
            return copy if out is None else out.copy_(copy)

    def download(self, tensors: Sequence[torch.Tensor]) -> Fetch:
        """See ``Accelerator.download``."""
        self._refuse("a copy to the host")
        return _Download([staging_copy(x) for x in tensors])

    def capture(self, run: Run) -> tuple[CapturedWork, tuple[torch.Tensor, ...]]:
        """See ``Accelerator.capture``; results are spoiled until a replay makes them."""
        self._capturing = True
        recording = Recording()
        try:
            results = recording.record(run)
        finally:
            self._capturing = False
        for x in results:
            x.fill_(float("nan") if x.is_floating_point() else 0)
        self.captures += 1
        return recording, results

    def memory(self) -> Memory:
        """The host's, as if it were the GPU's own."""
        self._refuse("a question for free memory")
        found = host_memory()
        return Memory(total=found.total, free=found.free)

    def peak(self, run: Callable[[], None]) -> int | None:
        """None: torch does not count what it holds in host memory."""
        return None

    def close(self) -> None:
        """Nothing is held."""

    def _refuse(self, what: str) -> None:
        """Raise while work is captured.

        Raises:
            RuleError: it is.
        """
        if self._capturing:
            raise RuleError(f"{what} cannot be captured. Make it before the capture, into memory that stays.")


class _Download:
    def __init__(self, staged: Sequence[torch.Tensor]) -> None:
        self._staged = tuple(staged)
        self._arrays: tuple[np.ndarray[Any, Any], ...] | None = None

    def wait(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Copy now, as late as a GPU may."""
        if self._arrays is None:
            with lifted():
                self._arrays = tuple(x.numpy().copy() for x in self._staged)
        return self._arrays


def _repair_interpreter() -> None:
    """Have kernels compute in bfloat16 as they do on a GPU."""
    from cardan_kernels.interpreter import repair

    repair()


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter in this process."""
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)


def require_interpreter() -> None:
    """Refuse to stand in for a GPU where kernels would be compiled for one.

    Raises:
        ConfigError: Triton is not installed, or was not told to interpret.
    """
    if not interpreted():
        raise ConfigError(
            "--platform-option device=emulated runs kernels in Triton's interpreter, which is not on in this process. "
            "Install triton, and start with TRITON_INTERPRET=1 in the environment."
        )
