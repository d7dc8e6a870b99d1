"""At how many rows linears of the native kernels change from one kernel to another: the numbers of the package, by
variant, and what the module says of each.

It measures nothing (``cardan_cpu.native_tuning`` does) and imports no kernels.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import numpy as np

from cardan.quantization import format_spec

FEW = "few"
"""Up to so many rows a kernel that takes codes apart in registers, beyond it one that widens them into the cache."""

MANY = "many"
"""From so many rows on a kernel for many, where the processor has better instructions for that."""

REGISTERS, CACHE, FOR_MANY = "registers", "cache", "many"
"""What the module calls the kernels: codes taken apart in registers, codes widened into the cache, and that for many
rows."""

KERNELS = {FEW: REGISTERS, MANY: FOR_MANY}
"""The kernel that each number gives its rows to."""

SMALL = (16, 256)
"""Rows and columns of a weight that every format can have."""


@functools.cache
def default_crossovers(variant: str) -> Mapping[str, int]:
    """The numbers of the package for a variant of the kernels, by name: ``nibble-int16.few``."""
    text = (resources.files("cardan_cpu") / "crossovers.json").read_text(encoding="utf-8")
    return dict(json.loads(text).get(variant, {}))


def crossover_ranges(native: Any, fmt: str, rounding: str, dtype: str = "float32") -> dict[str, tuple[int, int]]:
    """The crossovers that matter to a linear, by name, with their least and their most.

    Args:
        native: a loaded variant.
        fmt: format of the weight.
        rounding: what activations are rounded to.
        dtype: type of the activations.
    """
    spec, (rows, columns) = format_spec(fmt), SMALL
    raw = np.zeros(rows * columns // spec.block_elements * spec.block_bytes, np.uint8)

    def pack(crossovers: Mapping[str, int]) -> Any:
        return native.pack_linear(fmt, [raw], [rows], columns, dtype, None, rounding, crossovers)

    there = {name: (least, most) for name, (least, most, _) in pack({}).crossovers.items()}
    latest = {name: most for name, (_, most) in there.items()}
    found = {}
    for name, bounds in there.items():
        part = name.rpartition(".")[2]
        alone = latest if part == FEW else {**latest, name: bounds[0]}
        if native.linear_kernel(pack(alone), 1) == KERNELS[part]:
            found[name] = bounds
    return found
