"""Which back end of MLX computes here: asked in one place, for what is claimed and for what is opened.

It knows no capability and no model.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from cardan.errors import UnsupportedError

OLDEST_MLX = (0, 30, 4)
"""Oldest release that the tests pass on: it was the first with ``mx.device_info`` for every back end."""

OTHER_GPUS = {"mlx-cuda": "CUDA", "mlx-cuda-12": "CUDA", "mlx-cuda-13": "CUDA"}
"""Distributions that make MLX compute on a GPU that is not Apple's."""

ADVICE = "Install 'cardan[mlx]' in an environment without it, or choose another platform"


class Backend(enum.StrEnum):
    """Back ends of MLX that Cardan computes on."""

    METAL = "metal"
    CPU = "cpu"


def missing(*, on_linux: bool) -> str | None:
    """What MLX lacks to compute here, or None; nothing is imported and no device is touched."""
    spec = find_spec("mlx")
    if spec is None or find_spec("mlx.core") is None:
        return "mlx is not installed; `pip install 'cardan[mlx]'` brings it"
    found = _version("mlx")
    if found is not None and _numbers(found) < OLDEST_MLX:
        oldest = ".".join(map(str, OLDEST_MLX))
        return f"mlx {found} is installed, {oldest} or newer is needed; `pip install -U 'cardan[mlx]'` brings it"
    for distribution, kind in OTHER_GPUS.items():
        if _version(distribution) is not None:
            return f"MLX's {kind} back end ({distribution}) is installed, which Cardan does not compute on. {ADVICE}"
    if on_linux and not _has_library(spec.submodule_search_locations or ()):
        return "mlx is installed without a back end; `pip install 'cardan[mlx]'` brings its CPU build"
    return None


def backend() -> Backend:
    """The back end that MLX's default device belongs to.

    Raises:
        UnsupportedError: it is a GPU that is not Apple's.
    """
    import mlx.core as mx

    if mx.default_device().type == mx.cpu:
        return Backend.CPU
    if mx.metal.is_available():
        return Backend.METAL
    raise UnsupportedError(
        f"MLX must compute on Metal or on its CPU build on platform 'mlx', got a GPU that is not Apple's. {ADVICE}."
    )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """The release's leading numbers: ``0.30.4.dev1`` gives ``(0, 30, 4)``."""
    numbers = []
    for part in text.split(".")[:3]:
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _has_library(folders: Iterable[str]) -> bool:
    return any(path.exists() for folder in folders for path in Path(folder).glob("lib*/libmlx.*"))
