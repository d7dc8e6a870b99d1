"""What methods of integer groups share: codes, scales and zero points become blocks, columns of a group side by side.

It knows no names of tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cardan.quantization import affine_format, integer_format
from cardan.types import Float32Array, Int32Array
from cardan.weights.quantized.codes import Bytes, reordered
from cardan.weights.quantized.module import Groups, Module


def grouped_format(groups: Groups, bits: int, scale: str, *, symmetric: bool) -> str:
    """The format of groups: signed codes and the file's own scales, or a scale and an offset in float32.

    Zero points times scales need more digits than a half has; float32 holds them, but for float32 scales, whose
    products are rounded.
    """
    return integer_format(bits, groups.block, scale) if symmetric else affine_format(bits, groups.block, "F32")


def symmetric_blocks(groups: Groups, bits: int, codes: Bytes, scales: npt.NDArray[Any]) -> Bytes:
    """Blocks of an ``INT`` format.

    Args:
        groups: how columns share scales.
        bits: of a code.
        codes: uint8 ``[rows, bytes]``, codes stored with half their range added.
        scales: ``[rows, groups]``, floats as their bits.
    """
    return groups.joined(codes ^ np.uint8(0x80) if bits == 8 else codes, groups.blocks(scales))


def affine_blocks(groups: Groups, codes: Bytes, scales: Float32Array, zeros: npt.NDArray[Any]) -> Bytes:
    """Blocks of an ``AFFINE`` format with float32 scales, whose values are ``scale * (code - zero)``.

    Args:
        groups: how columns share scales.
        codes: uint8 ``[rows, bytes]``.
        scales: ``[rows, groups]``.
        zeros: as ``scales``, whole numbers.
    """
    offsets = -(scales * zeros.astype(np.float32))
    return groups.joined(codes, groups.blocks(scales), groups.blocks(offsets))


def order_of(module: Module, suffix: str, groups: Groups) -> Int32Array | None:
    """The order that puts columns of one group side by side, from the group of each; None where they stand so.

    Raises:
        CheckpointError: a group has not as many columns as the others.
    """
    index = module.numbers(suffix).astype(np.int64)
    if np.array_equal(index, np.arange(groups.columns) // groups.group):
        return None
    outside = index.min() < 0 or index.max() >= groups.count
    if outside or (np.bincount(index, minlength=groups.count) != groups.group).any():
        module.fail(
            f"{module.name}{suffix} must name each of {groups.count} groups {groups.group} times, but it names "
            f"groups {index.min()} to {index.max()} unevenly"
        )
    return np.argsort(index, kind="stable").astype(np.int32)


def in_order(codes: Bytes, bits: int, order: Int32Array | None) -> Bytes:
    """Packed rows with their columns in that order."""
    return codes if order is None else reordered(codes, bits, order)
