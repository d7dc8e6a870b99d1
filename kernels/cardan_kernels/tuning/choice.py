"""Looks configurations up: a chip's own file first, then that of its family, then the one for all.

It measures nothing and knows no kernel. A file ``configs/NAME.json`` is an object with

- ``about``: why its numbers are as they are, for people;
- ``measured_on``: the device that they were measured on, or null where they were not;
- ``ops``: by operation a list of entries ``{"when": {"rows": [1, 8]}, "config": {"block_k": 256, "num_warps": 4}}``.

Bounds of ``when`` are inclusive, and null leaves a side open. The first entry that fits the shape is taken, and numbers
that it lacks come from the next file in which an entry fits.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from cardan.errors import UnsupportedError
from cardan_kernels.chips import CHIPS, chip

DEFAULT = "default"

Shape = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """How one kernel is launched.

    Attributes:
        op: the operation.
        chip: that it was chosen for.
        values: numbers by name, such as ``block_m``; ``num_warps`` and ``num_stages`` among them.
        source: ``tuned for CHIP (DEVICE)`` where they were measured there, else ``default``, with the chip or family
            whose limits they keep to.
    """

    op: str
    chip: str
    values: Mapping[str, int]
    source: str

    def __getitem__(self, name: str) -> int:
        """A number by name."""
        return self.values[name]

    @property
    def num_warps(self) -> int:
        """Warps of a block."""
        return self.values["num_warps"]

    @property
    def num_stages(self) -> int:
        """Loads in flight."""
        return self.values["num_stages"]


def choose(op: str, chip_name: str, shape: Shape) -> KernelConfig:
    """The configuration of ``op`` on a chip for a shape, such as ``{"rows": 8, "out": 4096, "in": 4096}``.

    Raises:
        UnsupportedError: the chip is unknown, or no file has an entry for the operation.
    """
    return _choose(op, chip_name, tuple(sorted(shape.items())))


@functools.lru_cache(maxsize=4096)
def _choose(op: str, chip_name: str, shape: tuple[tuple[str, int], ...]) -> KernelConfig:
    values: dict[str, int] = {}
    sources: list[str] = []
    for name in (chip_name, chip(chip_name).family, DEFAULT):
        entry = _entry(name, op, dict(shape))
        if entry is not None:
            values = {**entry, **values}
            sources.append(_source(name))
    if not sources:
        raise UnsupportedError(
            f"No configuration of kernel {op!r} fits {dict(shape)}; known are {', '.join(known_ops())}. "
            "Add an entry to tuning/configs/default.json."
        )
    return KernelConfig(op, chip_name, values, sources[0])


def known_ops() -> tuple[str, ...]:
    """Every operation that a file has entries for."""
    files = (DEFAULT, *{chip.family for chip in CHIPS.values()}, *CHIPS)
    return tuple(sorted({op for name in files for op in _file(name).get("ops", {})}))


def _source(name: str) -> str:
    measured = _file(name).get("measured_on")
    if measured:
        return f"tuned for {name} ({measured})"
    return DEFAULT if name == DEFAULT else f"default for {name}"


def _entry(name: str, op: str, shape: Shape) -> dict[str, int] | None:
    for entry in _file(name).get("ops", {}).get(op, ()):
        if all(_within(shape.get(axis), bounds) for axis, bounds in entry.get("when", {}).items()):
            return dict(entry["config"])
    return None


def _within(size: int | None, bounds: list[int | None]) -> bool:
    low, high = bounds
    return size is not None and (low is None or size >= low) and (high is None or size <= high)


@functools.cache
def _file(name: str) -> dict[str, Any]:
    path = resources.files("cardan_kernels.tuning") / "configs" / f"{name}.json"
    if not path.is_file():
        return {}
    return dict(json.loads(path.read_text()))
