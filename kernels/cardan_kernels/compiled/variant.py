"""Variants of kernels: calls of public functions that a plan can lead to, on tensors without memory.

It compiles nothing. A folder of kernels has a module ``variants`` with a function ``variants(chip: str)`` that returns
its variants for one chip, those left out that a plan refuses there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

FOLDERS: tuple[str, ...] = ("attention", "rope", "norm", "activation", "linear", "quantize", "sampling")
"""Folders of ``cardan_kernels`` that hold kernels."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way that a kernel is compiled.

    Attributes:
        op: the operation, as in ``cardan_kernels.tuning``.
        features: what distinguishes it from the operation's other variants, such as ``{"dtype": "bfloat16"}``; every
            pair of values of two features is compiled in each change that is tried, every variant before a release.
        run: calls the public function on tensors that ``empty`` made; every kernel that it launches is compiled.
        default: whether a plan takes it without being told to; it must not spill.
    """

    op: str
    features: Mapping[str, str]
    run: Callable[[], Any]
    default: bool = True

    @property
    def name(self) -> str:
        """The operation and the values of its features."""
        return " ".join((self.op, *self.features.values()))


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor with a shape and a type and no memory, as variants are run on."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def variants(chip: str, folders: Iterable[str] = FOLDERS) -> tuple[Variant, ...]:
    """All variants for a chip, those of ``folders`` only where they are given."""
    found: list[Variant] = []
    for folder in folders:
        name = f"cardan_kernels.{folder}.variants"
        if find_spec(f"cardan_kernels.{folder}") is not None and find_spec(name) is not None:
            found += importlib.import_module(name).variants(chip)
    return tuple(found)
