"""How weight formats become few neutral layouts: codes, a scale and perhaps an offset for each group of a row.

It knows no kernel and no GEMM. Names of formats are those of checkpoints' tensors (``TensorView.dtype``).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch


class Coding(enum.IntEnum):
    """What a code stands for, before its group's scale.

    Codes of 4 bits come two a byte: byte ``16 u + i`` of a row holds element ``32 u + i`` in its low and element
    ``32 u + 16 + i`` in its high half, so that each half of a tile of bytes multiplies whole runs of activations.
    """

    INT4 = 0
    """``code - 8``."""
    UINT4 = 1
    """The code, with an offset for each group."""
    FLOAT4 = 2
    """Half a float E2M1's value doubled: 0, 1, 2, 3, 4, 6, 8, 12 and the same below 0; the scale is halved instead."""
    INT8 = 3
    """A signed byte."""
    UINT8 = 4
    """An unsigned byte, with an offset for each group."""
    FLOAT8 = 5
    """A float E4M3 of the form without infinities (``fn``)."""

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self in (Coding.INT4, Coding.UINT4, Coding.FLOAT4) else 8

    @property
    def has_offset(self) -> bool:
        """Whether values are ``scale * code + offset``."""
        return self in (Coding.UINT4, Coding.UINT8)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where a format's blocks keep what.

    Attributes:
        coding: of its codes.
        elements: consecutive elements of a row in a block.
        scale: type of the scale, which comes first and an offset after it; None where it is one byte, an exponent.
        interleaved: codes of 4 bits stand in order, two neighbours a byte; otherwise 16 apart, as ``Coding`` has them.
        rounds: activations of its linears are rounded to int8, as part of its meaning.
    """

    coding: Coding
    elements: int
    scale: torch.dtype | None
    interleaved: bool = False
    rounds: bool = False

    @property
    def scale_bytes(self) -> int:
        """Of one scale."""
        return 1 if self.scale is None else self.scale.itemsize

    @property
    def head_bytes(self) -> int:
        """Of a block before its codes."""
        return self.scale_bytes * (2 if self.coding.has_offset else 1)

    @property
    def block_bytes(self) -> int:
        """Of a whole block."""
        return self.head_bytes + self.elements * self.coding.bits // 8


GROUPS = (32, 64, 128)
_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def _layouts() -> dict[str, BlockLayout]:
    half = torch.float16
    found = {
        "Q4_0": BlockLayout(Coding.INT4, 32, half),
        "Q4_1": BlockLayout(Coding.UINT4, 32, half),
        "Q8_0": BlockLayout(Coding.INT8, 32, half),
        "MXFP4": BlockLayout(Coding.FLOAT4, 32, None),
    }
    for group in GROUPS:
        for key, dtype in _SCALES.items():
            found[f"INT4_{group}_{key}"] = BlockLayout(Coding.INT4, group, dtype, interleaved=True)
            found[f"INT8_{group}_{key}"] = BlockLayout(Coding.INT8, group, dtype)
            found[f"AFFINE4_{group}_{key}"] = BlockLayout(Coding.UINT4, group, dtype, interleaved=True)
            found[f"AFFINE8_{group}_{key}"] = BlockLayout(Coding.UINT8, group, dtype)
        found[f"INT8_{group}_F32_A8"] = BlockLayout(Coding.INT8, group, torch.float32, rounds=True)
        found[f"FP8_{group}_F32"] = BlockLayout(Coding.FLOAT8, group, torch.float32)
    return found


LAYOUTS: Mapping[str, BlockLayout] = _layouts()
"""Every format that packs without a change of its values, by name."""


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A weight ``[out_features, in_features]`` in a neutral layout, on a device.

    Attributes:
        coding: what codes stand for.
        codes: uint8 ``[out_features, in_features * bits / 8]``.
        scales: ``[groups, out_features]``, float16, bfloat16 or float32.
        offsets: as ``scales``, or None where the coding has none.
        group: consecutive elements of a row that share a scale; ``in_features`` where a whole row does.
        in_features: elements of a row, a multiple of 32.
    """

    coding: Coding
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    group: int
    in_features: int

    @property
    def out_features(self) -> int:
        """Rows."""
        return int(self.codes.shape[0])

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """A weight ``[out_features, in_features]`` of codes that matrix units multiply as they are, on a device.

    Attributes:
        codes: int8, or floats of 8 bits in the form of the chip, ``[out_features, in_features]``.
        scales: float32 ``[groups, out_features]``.
        group: consecutive elements of a row that share a scale: ``in_features``, or a multiple of 32.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group: int

    @property
    def out_features(self) -> int:
        """Rows."""
        return int(self.codes.shape[0])

    @property
    def in_features(self) -> int:
        """Columns."""
        return int(self.codes.shape[1])

    @property
    def num_bytes(self) -> int:
        """Of both tensors."""
        return self.codes.nbytes + self.scales.nbytes
