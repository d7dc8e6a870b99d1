"""CPU kernels of Cardan: finds the variant that suits this processor and loads it.

It knows neither Cardan's ops table nor torch; arrays are its own ``Tensor`` and numpy's.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import cast

from cardan_native import _probe
from cardan_native.kernels import Graph, Kernels, Tensor, to_array, to_bits, to_tensor

__all__ = ["VARIANTS", "Graph", "Kernels", "Tensor", "available", "chosen", "load", "to_array", "to_bits", "to_tensor"]

VARIANTS = ("portable", "avx2", "avx512", "amx")
"""All variants, the plainest first."""


def available() -> tuple[str, ...]:
    """Variants that this build has and this processor runs, the plainest first."""
    return tuple(name for name in _probe.runnable() if find_spec(f"cardan_native._{name}") is not None)


def chosen() -> str:
    """The variant that ``load`` takes: the one that ``CARDAN_ISA`` names, else the best.

    Raises:
        ValueError: ``CARDAN_ISA`` names none that runs here, or there is none.
    """
    runnable = available()
    if not runnable:
        raise ValueError(
            f"This build has no variant that the processor runs, {', '.join(_probe.runnable())}. Build it here."
        )
    forced = os.environ.get("CARDAN_ISA", "")
    if not forced:
        return runnable[-1]
    if forced not in runnable:
        raise ValueError(
            f"CARDAN_ISA must name a variant that this processor runs, {', '.join(runnable)}, got {forced!r}. "
            "Unset it to take the best."
        )
    return forced


@cache
def load(variant: str | None = None) -> Kernels:
    """The kernels of one variant, by default of the chosen one.

    Raises:
        ValueError: it cannot run here.
    """
    name = chosen() if variant is None else variant
    if name not in available():
        raise ValueError(f"This processor runs {', '.join(available())}, got {name!r}. Take one of them.")
    return cast(Kernels, import_module(f"cardan_native._{name}"))
