"""Which kernels compute on this machine: those of ``cardan_native``, or torch.

It imports neither torch nor a variant's module to find out, so that listing platforms stays cheap.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from cardan.errors import ConfigError
from cardan.platform import Evidence

NATIVE = "native"
TORCH = "torch"
KINDS = ("auto", NATIVE, TORCH)
"""Values of ``--platform-option kernels=…``; ``auto`` takes the native kernels where they can be used."""

VERIFIED = {
    "portable": Evidence.HARDWARE,
    "avx2": Evidence.HARDWARE,
    "avx512": Evidence.HARDWARE,
    "amx": Evidence.SIMULATOR,
}
"""How the tests of each variant of the native kernels have been run: on a processor that has its instructions, or with
these emulated (``make native-emulate``)."""

NO_TORCH = "torch is not installed; `pip install 'cardan[cpu]'` brings it"
NO_NATIVE = "cardan-native is not installed; `pip install ./kernels/native` builds it from Cardan's sources"


@dataclass(frozen=True, slots=True)
class Choice:
    """Which kernels compute.

    Attributes:
        kind: ``native`` or ``torch``; None where neither can.
        reason: why, for people.
        variant: the instruction set that the native kernels are compiled for.
    """

    kind: str | None
    reason: str
    variant: str | None = None

    @property
    def name(self) -> str:
        """The kernels with their variant: ``native kernels (avx2)``."""
        return f"native kernels ({self.variant})" if self.kind == NATIVE else "torch's kernels"


def choose(asked: str = "auto") -> Choice:
    """The kernels that a value of the option gives here, or why it gives none."""
    native = _native()
    torch = Choice(TORCH, "torch is installed") if find_spec("torch") is not None else Choice(None, NO_TORCH)
    if asked == NATIVE:
        return native
    if asked == TORCH or native.kind is None:
        if torch.kind is None and asked == "auto":
            return Choice(None, f"{native.reason}; {torch.reason}")
        return torch
    return native


def require(asked: str) -> Choice:
    """As ``choose``.

    Raises:
        ConfigError: none can compute.
    """
    choice = choose(asked)
    if choice.kind is None:
        others = " or ".join(f"kernels={kind}" for kind in (NATIVE, TORCH) if choose(kind).kind is not None)
        advice = f"Install it, or pass --platform-option {others}." if others else "Install one of them."
        raise ConfigError(f"--platform-option kernels={asked} cannot be used here: {choice.reason}. {advice}")
    return choice


def _native() -> Choice:
    if find_spec("cardan_native") is None:
        return Choice(None, NO_NATIVE)
    try:
        from cardan_native import chosen

        variant = chosen()
    except (ImportError, ValueError) as error:
        return Choice(None, f"cardan-native cannot be loaded: {str(error).rstrip('.')}")
    return Choice(NATIVE, f"cardan-native is installed, for {variant}", variant)
