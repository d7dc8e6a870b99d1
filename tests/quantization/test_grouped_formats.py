"""Formats whose groups have a scale of their own: values against float64 formulas over their fields."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cardan.quantization import (
    FLOAT8_FORMATS,
    FORMATS,
    INTEGER_FORMATS,
    dequantize,
    float8_format,
    integer_format,
    rounded_format,
)
from cardan.types import TensorView

SCALES = {"float16": np.float16, "float32": np.float32, "bfloat16": np.uint16}


def scales(kind: str, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Stored scales ``[count, 1]`` and their values in float64."""
    values = (rng.normal(size=(count, 1)) * 0.1).astype(np.float32)
    if kind == "bfloat16":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    stored = values.astype(SCALES[kind])
    return stored, stored.astype(np.float64)


def view_of(fmt: str, blocks: np.ndarray) -> TensorView:
    spec = FORMATS[fmt]
    assert blocks.shape[1] == spec.block_bytes
    return TensorView("t", fmt, (len(blocks), spec.block_elements), np.ascontiguousarray(blocks).reshape(-1).data)


@pytest.mark.parametrize("fmt", INTEGER_FORMATS)
def test_integers_times_their_scale(fmt):
    spec, rng = FORMATS[fmt], np.random.default_rng(1)
    codes = rng.integers(-(2 ** (spec.bits - 1)), 2 ** (spec.bits - 1), (40, spec.group))
    stored, values = scales(spec.scale, 40, rng)
    if spec.bits == 8:
        packed = codes.astype(np.int8).view(np.uint8)
    else:
        packed = (codes[:, ::2] + 8 | codes[:, 1::2] + 8 << 4).astype(np.uint8)
    blocks = np.concatenate((stored.view(np.uint8).reshape(40, -1), packed), axis=1)
    np.testing.assert_array_equal(dequantize(view_of(fmt, blocks)), (codes * values).astype(np.float32))
    assert spec.symmetric
    assert spec.quantized


@pytest.mark.parametrize("fmt", FLOAT8_FORMATS)
def test_floats_of_eight_bits_times_their_scale(fmt):
    spec, rng = FORMATS[fmt], np.random.default_rng(2)
    codes = rng.integers(0, 256, (40, spec.group), dtype=np.uint8)
    stored, values = scales(spec.scale, 40, rng)
    exact = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy() * values
    blocks = np.concatenate((stored.view(np.uint8).reshape(40, -1), codes), axis=1)
    np.testing.assert_array_equal(dequantize(view_of(fmt, blocks)), exact.astype(np.float32))


def test_a_scale_of_mxfp4_may_be_nan():
    blocks = np.full((1, 17), 255, np.uint8)
    assert np.isnan(dequantize(view_of("MXFP4", blocks))).all()


def test_scales_of_mxfp4_cover_their_range():
    blocks = np.zeros((255, 17), np.uint8)
    blocks[:, 0], blocks[:, 1] = np.arange(255), 0x21  # 0.5 and, 16 further on, 1
    got = dequantize(view_of("MXFP4", blocks)).astype(np.float64)
    np.testing.assert_array_equal(got[:, 0], 2.0 ** (np.arange(255) - 128.0))
    np.testing.assert_array_equal(got[:, 16], 2.0 ** (np.arange(255) - 127.0))


def test_columns_are_put_back_in_their_order():
    rng = np.random.default_rng(3)
    values, order = rng.normal(size=(3, 64)).astype(np.float32), rng.permutation(64).astype(np.int32)
    view = TensorView(
        "t", "F32", (3, 64), np.ascontiguousarray(values[:, order]).reshape(-1).view(np.uint8).data, order
    )
    np.testing.assert_array_equal(dequantize(view), values)


def test_what_activations_are_rounded_to_is_part_of_the_format():
    codes = FORMATS[rounded_format(128)].activations
    assert codes is not None
    assert (codes.largest, codes.group) == (127, None)
    assert FORMATS[integer_format(8, 128, "F32")].activations is None
    assert FORMATS[float8_format(128)].activations is None
