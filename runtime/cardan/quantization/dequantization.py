"""Exact float32 values of a tensor in any format.

It knows no file type. Work goes through in pieces that fit the processor's cache, so that only the result is large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cardan.errors import CheckpointError
from cardan.quantization.formats import AFFINE_BITS, FormatSpec, format_spec, tensor_bytes
from cardan.types import Float32Array, TensorView

Blocks: TypeAlias = npt.NDArray[Any]
"""Blocks of one format: uint8 ``[blocks, block_bytes]``."""

_PIECE_ELEMENTS = 1 << 18

_NUMPY_DTYPES: Mapping[str, str] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "<i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "<u1",
    "BOOL": "<u1",
}


def dequantize(view: TensorView) -> Float32Array:
    """Values of a tensor as float32, in its logical shape.

    Integers and float64 are rounded to the nearest float32, and so are products of a float32 scale with a code; every
    other format is exact. Columns that are stored in another order (``TensorView.order``) are put back in theirs.

    Raises:
        CheckpointError: the format is unknown, or the bytes do not fill the shape.
    """
    spec = format_spec(view.dtype)
    expected = tensor_bytes(view.dtype, view.shape)
    raw = np.frombuffer(view.data, dtype=np.uint8)
    if raw.size != expected:
        raise CheckpointError(
            f"Tensor {view.name!r} has {raw.size} bytes, but {view.dtype} of shape {view.shape} takes {expected}. "
            "The checkpoint is damaged; fetch it again."
        )
    out = np.empty(view.num_elements, dtype=np.float32)
    with np.errstate(all="ignore"):
        _fill(spec, raw, out)
    return _in_order(view, out.reshape(view.shape))


def _in_order(view: TensorView, stored: Float32Array) -> Float32Array:
    if view.order is None:
        return stored
    values = np.empty_like(stored)
    values[..., view.order] = stored
    return values


def _fill(spec: FormatSpec, raw: npt.NDArray[np.uint8], out: Float32Array) -> None:
    if spec.name in _NUMPY_DTYPES:
        out[:] = raw.view(_NUMPY_DTYPES[spec.name])
        return
    if spec.name == "BF16":
        out.view(np.uint32)[:] = raw.view("<u2")
        out.view(np.uint32)[:] <<= 16
        return
    if spec.name in ("F8_E4M3", "F8_E5M2"):
        out[:] = _float8_table(spec.name)[raw]
        return
    widen = _WIDEN.get(spec.name) or partial(_GROUPED[spec.name.partition("_")[0]], spec)
    blocks = raw.reshape(-1, spec.block_bytes)
    values = out.reshape(-1, spec.block_elements)
    step = _PIECE_ELEMENTS // spec.block_elements
    for start in range(0, blocks.shape[0], step):
        piece = blocks[start : start + step]
        values[start : start + step] = widen(piece).reshape(piece.shape[0], spec.block_elements)


def _float8_table(fmt: str) -> Float32Array:
    exponent_bits, bias = (4, 7) if fmt == "F8_E4M3" else (5, 15)
    mantissa_bits = 7 - exponent_bits
    code = np.arange(256)
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    fraction = (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    magnitude = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if fmt == "F8_E4M3":
        magnitude[code & 0x7F == 0x7F] = np.nan
    else:
        magnitude[code & 0x7F == 0x7C] = np.inf
        magnitude[code & 0x7F > 0x7C] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


def _half(blocks: Blocks, at: int) -> Float32Array:
    """The float16 at byte ``at`` of each block, float32 ``[blocks, 1]``."""
    halves: Float32Array = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)
    return halves


def _nibbles(quants: Blocks) -> Blocks:
    """Sixteen bytes of each block to their 32 elements, low halves first."""
    return np.concatenate((quants & 0x0F, quants >> 4), axis=1)


def _fifth_bits(words: Blocks) -> Blocks:
    """A 32-bit word of each block to 32 elements that are 0 or 16."""
    return np.unpackbits(words, axis=1, bitorder="little") << 4


def _widen_q4_0(blocks: Blocks) -> Float32Array:
    q = _nibbles(blocks[:, 2:]).astype(np.float32)
    return (q - np.float32(8)) * _half(blocks, 0)


def _widen_q4_1(blocks: Blocks) -> Float32Array:
    q = _nibbles(blocks[:, 4:]).astype(np.float32)
    return q * _half(blocks, 0) + _half(blocks, 2)


def _widen_q5_0(blocks: Blocks) -> Float32Array:
    q = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).astype(np.float32)
    return (q - np.float32(16)) * _half(blocks, 0)


def _widen_q5_1(blocks: Blocks) -> Float32Array:
    q = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])).astype(np.float32)
    return q * _half(blocks, 0) + _half(blocks, 2)


def _widen_q8_0(blocks: Blocks) -> Float32Array:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _widen_mxfp4(blocks: Blocks) -> Float32Array:
    """Source: OCP Microscaling Formats (MX) Specification v1.0; the exponent 255 is NaN."""
    exponent = blocks[:, :1].astype(np.int32)
    scale = np.where(exponent == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponent - 127))
    values: Float32Array = _E2M1[_nibbles(blocks[:, 1:])] * scale
    return values


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
"""Values of the floats of 4 bits: a sign, two bits of exponent, one of mantissa."""


def _widen_affine(spec: FormatSpec, blocks: Blocks) -> Float32Array:
    width = _scale_bytes(spec)
    scale, offset = (_numbers(blocks[:, at : at + width], spec.scale) for at in (0, width))
    return _codes_in_order(spec, blocks[:, 2 * width :]).astype(np.float32) * scale + offset


def _widen_integers(spec: FormatSpec, blocks: Blocks) -> Float32Array:
    width = _scale_bytes(spec)
    codes = blocks[:, width:]
    scale = _numbers(blocks[:, :width], spec.scale)
    if spec.bits == 8:
        return codes.view(np.int8).astype(np.float32) * scale
    return (_codes_in_order(spec, codes).astype(np.float32) - np.float32(8)) * scale


def _widen_float8(spec: FormatSpec, blocks: Blocks) -> Float32Array:
    width = _scale_bytes(spec)
    values: Float32Array = _float8_table("F8_E4M3")[blocks[:, width:]] * _numbers(blocks[:, :width], spec.scale)
    return values


def _scale_bytes(spec: FormatSpec) -> int:
    return 4 if spec.scale == "float32" else 2


def _codes_in_order(spec: FormatSpec, packed: Blocks) -> Blocks:
    """Codes of 8 bits, or of 4 with the first of a byte in its low half."""
    if spec.bits == 8:
        return packed
    return np.stack((packed & 0x0F, packed >> 4), axis=-1).reshape(len(packed), -1)


def _numbers(raw: Blocks, dtype: str) -> Float32Array:
    """One number of each block, float32 ``[blocks, 1]``."""
    raw = np.ascontiguousarray(raw)
    if dtype == "bfloat16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return np.asarray(raw.view({"float16": "<f2", "float32": "<f4"}[dtype]), dtype=np.float32)


# --- blocks of 256 with scales of scales --------------------------------------------------------


def _planes_of_two(quants: Blocks) -> Blocks:
    """64 bytes of each block to ``[blocks, 16, 16]``: per half of 32 bytes, four planes of 2 bits."""
    halves = quants.reshape(-1, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    return (halves >> shifts & 3).reshape(-1, 16, 16)


def _scales_and_offsets(packed: Blocks) -> tuple[Blocks, Blocks]:
    """Twelve bytes of each block to eight 6-bit scales and eight 6-bit offsets, each uint8 ``[blocks, 8]``."""
    low_scales, low_offsets, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((low_scales & 63, rest & 0x0F | low_scales >> 6 << 4), axis=1)
    offsets = np.concatenate((low_offsets & 63, rest >> 4 | low_offsets >> 6 << 4), axis=1)
    return scales, offsets


def _nibble_chunks(quants: Blocks) -> Blocks:
    """128 bytes of each block to eight groups of 32, uint8 ``[blocks, 8, 32]``."""
    chunks = quants.reshape(-1, 4, 1, 32)
    return np.concatenate((chunks & 0x0F, chunks >> 4), axis=2).reshape(-1, 8, 32)


def _affine_groups(blocks: Blocks, quants: Blocks) -> Float32Array:
    """Eight groups of 32 with the 16 bytes of scales and offsets that Q4_K and Q5_K begin with."""
    scales, offsets = _scales_and_offsets(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales.astype(np.float32))[:, :, None]
    offset = (_half(blocks, 2) * offsets.astype(np.float32))[:, :, None]
    return quants.astype(np.float32) * scale - offset


def _widen_q2_k(blocks: Blocks) -> Float32Array:
    packed = blocks[:, :16]
    scale = (_half(blocks, 80) * (packed & 0x0F).astype(np.float32))[:, :, None]
    offset = (_half(blocks, 82) * (packed >> 4).astype(np.float32))[:, :, None]
    return _planes_of_two(blocks[:, 16:80]).astype(np.float32) * scale - offset


def _widen_q3_k(blocks: Blocks) -> Float32Array:
    packed = blocks[:, 96:108]
    low = np.concatenate((packed[:, :8] & 0x0F, packed[:, :8] >> 4), axis=1)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 4, 1)
    high = (packed[:, None, 8:] >> shifts & 3).reshape(-1, 16)
    scales = (low | high << 4).astype(np.float32) - np.float32(32)
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1) & 1).reshape(-1, 16, 16)
    q = (_planes_of_two(blocks[:, 32:96]) | third << 2).astype(np.float32) - np.float32(4)
    widened: Float32Array = q * (_half(blocks, 108) * scales)[:, :, None]
    return widened


def _widen_q4_k(blocks: Blocks) -> Float32Array:
    return _affine_groups(blocks, _nibble_chunks(blocks[:, 16:]))


def _widen_q5_k(blocks: Blocks) -> Float32Array:
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1) & 1
    return _affine_groups(blocks, _nibble_chunks(blocks[:, 48:]) | fifth << 4)


def _widen_q6_k(blocks: Blocks) -> Float32Array:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate((low & 0x0F, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    q = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - np.float32(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    values: Float32Array = q * (_half(blocks, 208) * scales)[:, :, None]
    return values


_WIDEN: Mapping[str, Callable[[Blocks], npt.NDArray[Any]]] = {
    "Q4_0": _widen_q4_0,
    "Q4_1": _widen_q4_1,
    "Q5_0": _widen_q5_0,
    "Q5_1": _widen_q5_1,
    "Q8_0": _widen_q8_0,
    "Q2_K": _widen_q2_k,
    "Q3_K": _widen_q3_k,
    "Q4_K": _widen_q4_k,
    "Q5_K": _widen_q5_k,
    "Q6_K": _widen_q6_k,
    "MXFP4": _widen_mxfp4,
}

_GROUPED: Mapping[str, Callable[[FormatSpec, Blocks], Float32Array]] = {
    **{f"AFFINE{bits}": _widen_affine for bits in AFFINE_BITS},
    **{f"INT{bits}": _widen_integers for bits in AFFINE_BITS},
    "FP8": _widen_float8,
}
"""By what their names begin with."""
