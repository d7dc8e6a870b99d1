"""What the kernels must know of a chip: its name, its limits, and the form of its floats of 8 bits.

It knows no kernel. Chips are named by what code is compiled for: ``sm_90``, ``gfx942``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from cardan.errors import UnsupportedError

KIB = 1024
INTERPRETER = "interpreter"
"""Stands for a chip where kernels run in Triton's interpreter, on tensors of the CPU."""


@dataclass(frozen=True, slots=True)
class Chip:
    """One kind of GPU.

    Attributes:
        name: what code is compiled for.
        family: ``cuda`` or ``hip``, as Triton calls its backends; ``interpreter`` for none.
        warp: threads of a warp (a wave).
        shared_bytes: shared memory (LDS) that one block may have.
        float8: type of the floats of 8 bits that its matrix units multiply, or None where they take none.
        examples: products, for people.
    """

    name: str
    family: str
    warp: int
    shared_bytes: int
    float8: torch.dtype | None
    examples: str


_FN, _FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz

CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("sm_80", "cuda", 32, 163 * KIB, None, "A100"),
        Chip("sm_86", "cuda", 32, 99 * KIB, None, "A10, RTX 3090"),
        Chip("sm_89", "cuda", 32, 99 * KIB, _FN, "L4, L40S, RTX 4090"),
        Chip("sm_90", "cuda", 32, 227 * KIB, _FN, "H100, H200"),
        Chip("sm_100", "cuda", 32, 227 * KIB, _FN, "B200"),
        Chip("sm_120", "cuda", 32, 99 * KIB, _FN, "RTX 5090, RTX PRO 6000"),
        Chip("gfx942", "hip", 64, 64 * KIB, _FNUZ, "MI300X, MI325X"),
        Chip("gfx950", "hip", 64, 160 * KIB, _FN, "MI350X, MI355X"),
        Chip("gfx1100", "hip", 32, 64 * KIB, None, "RX 7900 XTX"),
        Chip(INTERPRETER, INTERPRETER, 32, 227 * KIB, _FN, "none"),
    )
}
"""Every chip that kernels know, by name."""

COMPILED_FOR: tuple[str, ...] = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "gfx1100")
"""Chips that every kernel is compiled for, whatever machine the tests run on."""

_assumed: ContextVar[str | None] = ContextVar("assumed", default=None)


def chip(name: str) -> Chip:
    """A chip by name.

    Raises:
        UnsupportedError: kernels do not know it.
    """
    found = CHIPS.get(name)
    if found is None:
        raise UnsupportedError(
            f"chip must be one of {', '.join(CHIPS)}, got {name!r}. Choose a platform that runs on this device."
        )
    return found


def chip_of(device: torch.device) -> str:
    """Name of the chip that tensors of ``device`` are on; the interpreter's for the CPU's.

    Raises:
        UnsupportedError: there are no kernels for its kind of device.
    """
    assumed = _assumed.get()
    if assumed is not None:
        return assumed
    if device.type == "cpu":
        return INTERPRETER
    if device.type != "cuda":
        raise UnsupportedError(f"Kernels take tensors on a GPU, got one on {device.type!r}. Move it to the GPU.")
    return _gpu_name(torch.cuda.current_device() if device.index is None else device.index)


@contextmanager
def assume(name: str) -> Iterator[None]:
    """Take every tensor for one on the chip ``name``, while its code is compiled without it."""
    token = _assumed.set(chip(name).name)
    try:
        yield
    finally:
        _assumed.reset(token)


@functools.cache
def _gpu_name(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"
