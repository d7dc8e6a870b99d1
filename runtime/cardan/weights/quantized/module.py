"""One quantized linear of a checkpoint: its tensors by what their names end in, checked before they are read.

It knows no method: readers say which tensors they expect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from cardan.errors import CheckpointError
from cardan.quantization import AFFINE_GROUPS, AFFINE_SCALES, ActivationStep, CalibratedView, dequantize
from cardan.types import Float32Array, Int32Array, TensorView

Shape: TypeAlias = tuple[int, ...]
Entry: TypeAlias = tuple[str, Shape]
"""Format and shape of a tensor."""
Bytes: TypeAlias = npt.NDArray[np.uint8]

SCALES = tuple(AFFINE_SCALES)
"""Types that scales have."""

_NUMBERS: Mapping[str, str] = {"I32": "<i4", "I64": "<i8", "I8": "<i1", "U8": "<u1", "F8_E4M3": "<u1", "F16": "<u2"}
_NUMBERS = {**_NUMBERS, "BF16": "<u2", "F32": "<u4"}


@dataclass(frozen=True, slots=True)
class Module:
    """The tensors of one linear.

    Attributes:
        name: of the module, such as ``model.layers.0.mlp.up_proj``.
        entries: formats and shapes of its tensors, by what follows the name: ``.scales``.
        read: gives one of them.
    """

    name: str
    entries: Mapping[str, Entry]
    read: Callable[[str], TensorView]

    def fail(self, problem: str, advice: str = "Fetch the checkpoint again.") -> NoReturn:
        """Refuse the module.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(f"{self.name} cannot be read: {problem}. {advice}")

    def require(self, suffix: str, dtypes: tuple[str, ...], shape: Shape | None = None) -> Entry:
        """Format and shape of a tensor that must be there; ``shape`` is what it must have, where that is known.

        Raises:
            CheckpointError: it is missing, or of another type or shape.
        """
        entry = self.entries.get(suffix)
        if entry is None:
            self.fail(f"{self.name}{suffix} is missing beside {', '.join(sorted(self.entries))}")
        if entry[0] not in dtypes:
            self.fail(f"{self.name}{suffix} is {entry[0]}, expected {' or '.join(dtypes)}")
        if shape is not None and entry[1] != shape:
            self.fail(f"{self.name}{suffix} has shape {list(entry[1])}, expected {list(shape)}")
        return entry

    def matrix(self, suffix: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
        """Shape of a tensor that must be there and have two axes.

        Raises:
            CheckpointError: it is missing, or of another type, or has other axes.
        """
        shape = self.require(suffix, dtypes)[1]
        if len(shape) != 2 or 0 in shape:
            self.fail(f"{self.name}{suffix} has shape {list(shape)}, expected two axes")
        return shape[0], shape[1]

    def numbers(self, suffix: str) -> npt.NDArray[Any]:
        """The numbers of a tensor as they are stored; floats as unsigned integers of their bits."""
        view = self.read(suffix)
        return np.frombuffer(view.data, dtype=_NUMBERS[view.dtype]).reshape(view.shape)

    def floats(self, suffix: str) -> Float32Array:
        """The values of a tensor of scales.

        Raises:
            CheckpointError: one is NaN or infinite.
        """
        view = self.read(suffix)
        values = dequantize(view)
        broken = int((~np.isfinite(values)).sum())
        if broken:
            self.fail(f"{self.name}{suffix} holds NaN or infinity, {broken} of its {values.size} values")
        return values


@dataclass(frozen=True, slots=True)
class Packed:
    """A linear as one tensor of a neutral format, its data not yet touched.

    Attributes:
        fmt: a key of ``cardan.quantization.FORMATS``.
        shape: logical, ``(out_features, in_features)``.
        blocks: makes the bytes of all rows, and the order of their columns where that is not as they stand.
        activations: reads how the checkpoint has activations rounded, where it says so.
    """

    fmt: str
    shape: Shape
    blocks: Callable[[], tuple[Bytes, Int32Array | None]]
    activations: Callable[[], ActivationStep] | None = None

    def view(self, name: str) -> TensorView:
        """Put it together."""
        data, order = self.blocks()
        held = (name, self.fmt, self.shape, data.reshape(-1).data, order)
        return TensorView(*held) if self.activations is None else CalibratedView(*held, self.activations())


@dataclass(frozen=True, slots=True)
class Groups:
    """How the columns of a linear share scales.

    Attributes:
        rows: output features.
        columns: input features.
        group: columns that share a scale in the file.
        block: columns of a block, which a group is one or several of.
    """

    rows: int
    columns: int
    group: int
    block: int

    @property
    def count(self) -> int:
        """Groups of a row."""
        return self.columns // self.group

    def blocks(self, scales: npt.NDArray[Any]) -> Bytes:
        """Bytes of the scale of each block, uint8 ``[rows, blocks, bytes]``, from ``[rows, groups]``."""
        spread = np.repeat(np.ascontiguousarray(scales), self.group // self.block, axis=1)
        return spread.view(np.uint8).reshape(self.rows, self.columns // self.block, -1)

    def joined(self, codes: Bytes, *heads: Bytes) -> Bytes:
        """Blocks of what ``blocks`` gave, and the bytes of their codes: uint8 ``[rows, bytes]``."""
        parts = codes.reshape(self.rows, self.columns // self.block, -1)
        return np.concatenate((*heads, parts), axis=2).reshape(self.rows, -1)


def groups_of(module: Module, rows: int, columns: int, group: int) -> Groups:
    """Groups of ``group`` columns; -1 is the whole row.

    Raises:
        CheckpointError: groups do not fill the rows, or no block of Cardan's fits into one.
    """
    if group == -1:
        group = columns
    if group < 1 or columns % group:
        module.fail(f"groups of {group} do not divide its rows of {columns}", "Check that config.json belongs to it.")
    block = next((size for size in reversed(AFFINE_GROUPS) if group % size == 0), None)
    if block is None:
        listed = ", ".join(str(size) for size in AFFINE_GROUPS)
        module.fail(
            f"it has groups of {group}, and Cardan reads groups that are whole blocks of {listed}",
            "Choose a checkpoint with such groups, or one that is not quantized.",
        )
    return Groups(rows, columns, group, block)
