"""Linears with weights of 8-bit floats: a scale for the whole tensor, for each row, or for each block of both axes.

``weight`` E4M3 ``[out, in]`` beside ``weight_scale_inv`` or ``weight_scale``; a value is ``code * scale`` with either.
``input_scale`` and ``activation_scheme`` say how activations were rounded when the checkpoint was made.
Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.3, as its checkpoints have it.
"""

from __future__ import annotations

import numpy as np

from cardan.quantization import float8_format
from cardan.types import Float32Array, Int32Array
from cardan.weights.quantized.codes import Bytes
from cardan.weights.quantized.module import SCALES, Entry, Module, Packed, groups_of
from cardan.weights.quantized.reader import Reader
from cardan.weights.quantized.settings import ModuleNames, Settings

CODES = ("F8_E4M3",)
SCHEMES = ("dynamic", "static")
PARTS = (".weight_scale_inv", ".weight_scale", ".input_scale", ".activation_scale")


class Float8Reader(Reader):
    """``fp8`` with the settings of one checkpoint."""

    codes = (".weight",)
    parts = PARTS

    def __init__(self, settings: Settings) -> None:
        """Read them.

        Raises:
            CheckpointError: they are of a kind that Cardan does not read.
        """
        self._block = _block(settings)
        scheme = settings.text("activation_scheme", SCHEMES, "dynamic")
        settings.text("fmt", ("e4m3",), "e4m3")
        left_out = settings.names("modules_to_not_convert", "ignored_layers")
        self._left_out = ModuleNames(left_out, "modules_to_not_convert")
        scales = "one scale for each tensor or row" if self._block is None else f"blocks of {list(self._block)}"
        self.summary = (
            f"FP8 (E4M3), {scales}; made for activations in FP8 with {scheme} scales, which are multiplied "
            "as they are instead"
        )

    def takes(self, module: str, suffix: str, entry: Entry) -> bool:
        """Weights of 8-bit floats, but for what the config leaves out."""
        return entry[0] in CODES and module not in self._left_out

    def describe(self, module: Module) -> Packed:
        """See ``Reader.describe``."""
        suffix = ".weight_scale" if ".weight_scale" in module.entries else ".weight_scale_inv"
        return float8_weight(module, ".weight", suffix, self._block)


def _block(settings: Settings) -> tuple[int, int] | None:
    value = settings.values.get("weight_block_size")
    if value is None:
        return None
    whole = isinstance(value, list | tuple) and all(isinstance(size, int) and size > 0 for size in value)
    if not whole or len(value) != 2:
        raise settings.refuse("weight_block_size", "two whole numbers above 0")
    return int(value[0]), int(value[1])


def float8_weight(module: Module, suffix: str, scale_suffix: str, block: tuple[int, int] | None) -> Packed:
    """A weight of 8-bit floats as one tensor.

    Args:
        module: has the tensors.
        suffix: of the codes.
        scale_suffix: of the scales.
        block: rows and columns that share a scale; None for a scale for each row or one for all.

    Raises:
        CheckpointError: scales are missing or of another shape.
    """
    rows, columns = module.matrix(suffix, CODES)
    shape = module.require(scale_suffix, SCALES)[1]
    if block is None:
        check_row_scales(module, scale_suffix, rows)
        block = rows, columns
    else:
        expected = (-(-rows // block[0]), -(-columns // block[1]))
        if shape != expected:
            module.fail(
                f"{module.name}{scale_suffix} has shape {list(shape)}, but blocks of {list(block)} in a weight of "
                f"{[rows, columns]} need {list(expected)}"
            )
    shared = int(np.gcd(block[1], columns))
    groups = groups_of(module, rows, columns, shared)

    def blocks() -> tuple[Bytes, Int32Array | None]:
        scales = spread(module.floats(scale_suffix), rows, columns, block)[:, :: groups.group]
        return groups.joined(module.numbers(suffix), groups.blocks(scales)), None

    return Packed(float8_format(groups.block), (rows, columns), blocks)


def check_row_scales(module: Module, suffix: str, rows: int) -> None:
    """Make sure that there is one scale, or one for each row.

    Raises:
        CheckpointError: there are others.
    """
    shape = module.require(suffix, SCALES)[1]
    if shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
        module.fail(
            f"{module.name}{suffix} has shape {list(shape)}, expected one scale, or one for each of {rows} rows"
        )


def spread(scales: Float32Array, rows: int, columns: int, block: tuple[int, int]) -> Float32Array:
    """Scales of blocks, of rows or of all, for every row and column: a view of what is repeated where that does.

    ``[rows, columns]`` for blocks; ``[rows, 1]`` where a scale is for whole rows.
    """
    if block[1] >= columns:
        wide = np.broadcast_to(scales.reshape(-1, 1), (scales.size, 1))
    else:
        wide = np.repeat(scales, block[1], axis=1)[:, :columns]
    if wide.shape[0] == rows:
        return np.ascontiguousarray(wide)
    each = rows if scales.size == 1 else block[0]
    return np.ascontiguousarray(np.repeat(wide, each, axis=0)[:rows])
