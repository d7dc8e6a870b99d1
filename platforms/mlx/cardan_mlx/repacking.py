"""Block formats of checkpoints as MLX's affine form: packed integers, and a scale and a bias for each group.

It knows bytes and numpy only, no array library. MLX's form is ``value = scale * q + bias`` with unsigned ``q`` of
``bits`` bits, little-endian in 32-bit words, over groups of 32, 64 or 128 of a row.

Exact: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 (a scale, and for some an offset, over 32), Q4_K and Q5_K (a 6-bit multiple of
two half-precision numbers over 32, which float32 holds exactly). Q6_K has groups of 16, which MLX lacks: it is
requantized to 8 bits over groups of 32, which moves a weight by at most half of 1/255 of its group's range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]

GROUP = 32
SUPERBLOCK = 256

AFFINE_BITS, AFFINE_GROUPS = (4, 8), (32, 64, 128)
"""Bits of a code and columns of a group that checkpoints of MLX's own groups may have here."""


@dataclass(frozen=True, slots=True)
class Affine:
    """Weights in affine form.

    Attributes:
        codes: uint8 ``[rows, columns]``, each below ``2 ** bits``.
        scales: float32 ``[rows, columns / group]``.
        biases: float32 of the same shape.
        bits: of a code.
        group: columns that share a scale.
    """

    codes: Bytes
    scales: Floats
    biases: Floats
    bits: int
    group: int = GROUP


def pack_codes(codes: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """Codes ``[rows, columns]`` as little-endian bits in uint32 words ``[rows, columns * bits / 32]``."""
    rows = codes.shape[0]
    if bits == 8:
        return np.ascontiguousarray(codes).view("<u4")
    if bits == 4:
        return np.ascontiguousarray(codes[:, ::2] | (codes[:, 1::2] << 4)).view("<u4")
    planes = np.unpackbits(codes[:, :, None], axis=-1, count=bits, bitorder="little")
    return np.packbits(planes.reshape(rows, -1), axis=-1, bitorder="little").view("<u4")


def to_affine(fmt: str, data: memoryview, rows: int, columns: int) -> Affine:
    """Weights of a block format, ``rows`` of ``columns`` elements, in affine form."""
    convert, block_bytes, elements = CONVERTERS[fmt]
    blocks = np.frombuffer(data, dtype=np.uint8).reshape(rows * columns // elements, block_bytes)
    codes, scales, biases, bits = convert(blocks)
    return Affine(
        codes.reshape(rows, columns),
        scales.astype(np.float32).reshape(rows, columns // GROUP),
        biases.astype(np.float32).reshape(rows, columns // GROUP),
        bits,
    )


Converted: TypeAlias = tuple[Bytes, npt.NDArray[Any], npt.NDArray[Any], int]


def _halves(blocks: Bytes, start: int, count: int = 1) -> Floats:
    """``count`` float16 numbers of each block from byte ``start`` on, in float32."""
    raw = np.ascontiguousarray(blocks[:, start : start + 2 * count])
    return raw.view("<f2").astype(np.float32)


def _nibbles(blocks: Bytes, start: int) -> Bytes:
    """32 codes of 4 bits from 16 bytes: the low halves, then the high ones."""
    packed = blocks[:, start : start + 16]
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _fives(blocks: Bytes, start: int) -> Bytes:
    """32 codes of 5 bits: a word of fifth bits, then nibbles."""
    high = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    codes: Bytes = _nibbles(blocks, start + 4) | np.left_shift(high, np.uint8(4))
    return codes


def _q4_0(blocks: Bytes) -> Converted:
    scale = _halves(blocks, 0)
    return _nibbles(blocks, 2), scale, -8 * scale, 4


def _q4_1(blocks: Bytes) -> Converted:
    return _nibbles(blocks, 4), _halves(blocks, 0), _halves(blocks, 2), 4


def _q5_0(blocks: Bytes) -> Converted:
    scale = _halves(blocks, 0)
    return _fives(blocks, 2), scale, -16 * scale, 5


def _q5_1(blocks: Bytes) -> Converted:
    return _fives(blocks, 4), _halves(blocks, 0), _halves(blocks, 2), 5


def _q8_0(blocks: Bytes) -> Converted:
    scale = _halves(blocks, 0)
    codes: Bytes = blocks[:, 2:] ^ np.uint8(0x80)
    return codes, scale, -128 * scale, 8


def _six_bit_pairs(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight 6-bit scales and eight 6-bit offsets from the 12 bytes of a K-quant superblock."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((low & 63, (high & 15) | ((low >> 6) << 4)), axis=1)
    offsets = np.concatenate((middle & 63, (high >> 4) | ((middle >> 6) << 4)), axis=1)
    return scales, offsets


def _k_chunks(blocks: Bytes, start: int) -> Bytes:
    """256 codes of 4 bits: each 32 bytes hold one group in the low halves and the next in the high ones."""
    packed = blocks[:, start : start + 128].reshape(-1, 4, 1, 32)
    return np.concatenate((packed & 15, packed >> 4), axis=2).reshape(-1, SUPERBLOCK)


def _k_groups(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and biases of the eight groups; products of 11 and 6 bits are exact in float32."""
    factors = _halves(blocks, 0, 2)
    scales, offsets = _six_bit_pairs(blocks[:, 4:16])
    return factors[:, :1] * scales, -(factors[:, 1:] * offsets)


def _q4_k(blocks: Bytes) -> Converted:
    scales, biases = _k_groups(blocks)
    return _k_chunks(blocks, 16), scales, biases, 4


def _q5_k(blocks: Bytes) -> Converted:
    scales, biases = _k_groups(blocks)
    fifth = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").transpose(0, 2, 1).reshape(-1, SUPERBLOCK)
    codes: Bytes = _k_chunks(blocks, 48) | np.left_shift(fifth, np.uint8(4))
    return codes, scales, biases, 5


def _q6_k(blocks: Bytes) -> Converted:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate((low & 15, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = (pairs >> np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]) & 3
    codes = (low | (high << 4)).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208)
    return *requantize((codes * scales[:, :, None]).reshape(-1, GROUP)), 8


def requantize(groups: Floats) -> tuple[Bytes, Floats, Floats]:
    """Codes of 8 bits, scales and biases of ``groups: float32 [n, 32]``, from each group's least to its greatest."""
    least, greatest = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    scales = (greatest - least) / 255
    steps = np.divide(groups - least, scales, out=np.zeros_like(groups), where=scales > 0)
    return np.rint(steps).astype(np.uint8), scales, least


CONVERTERS: Mapping[str, tuple[Callable[[Bytes], Converted], int, int]] = {
    "Q4_0": (_q4_0, 18, 32),
    "Q4_1": (_q4_1, 20, 32),
    "Q5_0": (_q5_0, 22, 32),
    "Q5_1": (_q5_1, 24, 32),
    "Q8_0": (_q8_0, 34, 32),
    "Q4_K": (_q4_k, 144, 256),
    "Q5_K": (_q5_k, 176, 256),
    "Q6_K": (_q6_k, 210, 256),
}
"""By format: the conversion, and bytes and elements of a block."""

REQUANTIZED = {"Q6_K": "requantized at load to 8 bits over groups of 32: MLX has no groups of 16"}
"""Formats that are not taken exactly, and what happens to them."""

EXACT = tuple(fmt for fmt in CONVERTERS if fmt not in REQUANTIZED)
"""Block formats whose every weight keeps its value."""
