"""Write float32 values as blocks of Q4_0, Q4_1, Q5_0 or Q8_0, or as dense F32, F16 and BF16.

It rounds to the nearest step and searches no better scales: made for benchmarks and tests, not to publish models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cardan.errors import CheckpointError
from cardan.quantization.formats import format_spec, row_bytes
from cardan.types import Float32Array

_PIECE_ELEMENTS = 1 << 18


def quantize(values: npt.ArrayLike, fmt: str) -> bytes:
    """Bytes of ``values``, a row being the last axis, in format ``fmt``.

    Raises:
        CheckpointError: the format has no writer, a row does not consist of whole blocks, or a value is not
            finite or too large for a float16 scale.
    """
    if fmt not in _WRITERS:
        raise CheckpointError(f"Cardan cannot write {fmt!r}; it writes {', '.join(_WRITERS)}.")
    array = np.ascontiguousarray(values, dtype=np.float32)
    row_bytes(fmt, array.shape[-1] if array.ndim else 1)
    if not np.isfinite(array).all():
        raise CheckpointError(f"Cannot write values as {fmt}: they hold NaN or infinity.")
    spec = format_spec(fmt)
    rows = array.reshape(-1, spec.block_elements)
    step = _PIECE_ELEMENTS // spec.block_elements
    writer = _WRITERS[fmt]
    with np.errstate(over="ignore", divide="ignore"):
        return b"".join(writer(rows[start : start + step]) for start in range(0, rows.shape[0], step))


def _write_f32(rows: Float32Array) -> bytes:
    return rows.astype("<f4").tobytes()


def _write_f16(rows: Float32Array) -> bytes:
    return _half(rows, "F16").tobytes()


def _write_bf16(rows: Float32Array) -> bytes:
    """Round to nearest, ties to even, on the upper half of the float32."""
    bits = rows.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> 16 & 1)
    if (rounded & 0x7F800000 == 0x7F800000).any():
        raise CheckpointError("Cannot write values as BF16: they are too large.")
    return (rounded >> 16).astype("<u2").tobytes()


def _half(values: Float32Array, fmt: str) -> npt.NDArray[np.float16]:
    half = values.astype("<f2")
    if not np.isfinite(half).all():
        raise CheckpointError(f"Cannot write values as {fmt}: they need a float16 above 65504.")
    return half


def _raw(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Bytes of each row, uint8 ``[rows, bytes]``."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(array.shape[0], -1)


def _signed_extreme(rows: Float32Array) -> Float32Array:
    """The value of largest magnitude of each row, with its sign, ``[rows, 1]``."""
    largest, smallest = rows.max(axis=1, keepdims=True), rows.min(axis=1, keepdims=True)
    extreme: Float32Array = np.where(largest > -smallest, largest, smallest)
    return extreme


def _steps(rows: Float32Array, scale: Float32Array) -> Float32Array:
    """``rows / scale``, 0 where the scale is 0."""
    inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    return rows * np.where(np.isfinite(inverse), inverse, np.float32(0))


def _codes(steps: Float32Array, top: int) -> npt.NDArray[np.uint8]:
    return np.clip(np.rint(steps), 0, top).astype(np.uint8)


def _pack_nibbles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    return codes[:, :16] & 0x0F | codes[:, 16:] << 4


def _write_q4_0(rows: Float32Array) -> bytes:
    scale = _signed_extreme(rows) / np.float32(-8)
    codes = _codes(_steps(rows, scale) + np.float32(8), 15)
    return np.concatenate((_raw(_half(scale, "Q4_0")), _pack_nibbles(codes)), axis=1).tobytes()


def _write_q4_1(rows: Float32Array) -> bytes:
    smallest = rows.min(axis=1, keepdims=True)
    scale = (rows.max(axis=1, keepdims=True) - smallest) / np.float32(15)
    codes = _codes(_steps(rows - smallest, scale), 15)
    parts = (_raw(_half(scale, "Q4_1")), _raw(_half(smallest, "Q4_1")), _pack_nibbles(codes))
    return np.concatenate(parts, axis=1).tobytes()


def _write_q5_0(rows: Float32Array) -> bytes:
    scale = _signed_extreme(rows) / np.float32(-16)
    codes = _codes(_steps(rows, scale) + np.float32(16), 31)
    fifth = np.packbits(codes >> 4, axis=1, bitorder="little")
    return np.concatenate((_raw(_half(scale, "Q5_0")), fifth, _pack_nibbles(codes)), axis=1).tobytes()


def _write_q8_0(rows: Float32Array) -> bytes:
    scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    codes = np.clip(np.rint(_steps(rows, scale)), -127, 127).astype(np.int8)
    return np.concatenate((_raw(_half(scale, "Q8_0")), _raw(codes)), axis=1).tobytes()


_WRITERS: Mapping[str, Callable[[Float32Array], bytes]] = {
    "F32": _write_f32,
    "F16": _write_f16,
    "BF16": _write_bf16,
    "Q4_0": _write_q4_0,
    "Q4_1": _write_q4_1,
    "Q5_0": _write_q5_0,
    "Q8_0": _write_q8_0,
}

WRITABLE_FORMATS: tuple[str, ...] = tuple(_WRITERS)
"""Formats that ``quantize`` writes."""
