"""Rearrangements of packed codes, several of which share a word of 32 bits.

It knows no file and no method. Codes of a row come out in order, the first in the lowest bits of its byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cardan.types import Int32Array

Bytes = npt.NDArray[np.uint8]


def rows_of_words(words: npt.NDArray[Any]) -> Bytes:
    """Words ``[words, columns]`` packed along the first axis, to uint8 ``[columns, bytes]`` packed along the last."""
    turned = np.ascontiguousarray(words.T)
    return turned.view(np.uint8).reshape(turned.shape[0], -1)


def rows_of_nibbles(words: npt.NDArray[Any], places: Sequence[int]) -> Bytes:
    """Words ``[rows, columns / 8]`` of eight codes along the last axis, turned: uint8 ``[columns, rows / 2]``.

    Args:
        words: int32; the number of rows is even.
        places: which of its eight columns each nibble of a word is, the lowest first.
    """
    turned = np.ascontiguousarray(words.T).view(np.uint32)
    out = np.empty((turned.shape[0], 8, turned.shape[1] // 2), np.uint8)
    for nibble, column in enumerate(places):
        codes = (turned >> np.uint32(4 * nibble) & np.uint32(15)).astype(np.uint8)
        out[:, column] = codes[:, ::2] | codes[:, 1::2] << 4
    return out.reshape(-1, out.shape[2])


def unpack_words(words: npt.NDArray[Any], bits: int, places: Sequence[int] | None = None) -> Bytes:
    """Codes of words ``[rows, words]`` packed along the last axis: uint8 ``[rows, codes]``."""
    count = 32 // bits
    shifts = np.arange(count, dtype=np.uint32) * np.uint32(bits)
    codes = (words.view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)).astype(np.uint8)
    if places is not None:
        codes[..., list(places)] = codes.copy()
    return codes.reshape(words.shape[0], -1)


def reordered(packed: Bytes, bits: int, order: Int32Array) -> Bytes:
    """The columns of packed rows ``[rows, bytes]`` in another order."""
    if bits == 8:
        return packed[:, order]
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    codes[:, ::2] = packed & 15
    codes[:, 1::2] = packed >> 4
    codes = codes[:, order]
    packed_again: Bytes = codes[:, ::2] | codes[:, 1::2] << 4
    return packed_again
