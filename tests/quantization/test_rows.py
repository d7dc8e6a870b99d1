"""Picking rows of quantized tensors equals picking rows of their values."""

from __future__ import annotations

import numpy as np
import pytest

from cardan.errors import CheckpointError
from cardan.quantization import dequantize, gather_rows, quantize, slice_rows
from cardan.types import TensorView


def make(fmt: str, shape: tuple[int, ...]) -> TensorView:
    values = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    return TensorView("t", fmt, shape, memoryview(quantize(values, fmt)))


@pytest.mark.parametrize(("fmt", "shape"), [("Q4_1", (6, 64)), ("BF16", (6, 5)), ("F32", (6,)), ("Q8_0", (6, 2, 32))])
def test_rows_keep_their_values(fmt: str, shape: tuple[int, ...]) -> None:
    view = make(fmt, shape)
    values = dequantize(view)
    np.testing.assert_array_equal(dequantize(slice_rows(view, 2, 5)), values[2:5])
    order = [5, 0, 0, 3]
    gathered = gather_rows(view, order)
    assert gathered.dtype == fmt
    np.testing.assert_array_equal(dequantize(gathered), values[order])


def test_a_slice_shares_the_bytes() -> None:
    data = bytearray(quantize(np.ones((4, 32)), "Q8_0"))
    view = TensorView("t", "Q8_0", (4, 32), memoryview(data))
    part = slice_rows(view, 1, 2)
    data[34:36] = np.float16(2).tobytes()
    assert dequantize(part)[0, 0] == 254


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_slice_beyond_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(CheckpointError, match=f"'t' has 6 rows, rows {start} to {stop} were wanted"):
        slice_rows(make("F32", (6, 2)), start, stop)


@pytest.mark.parametrize("rows", [[6], [-1]])
def test_a_gather_beyond_the_tensor_is_refused(rows: list[int]) -> None:
    with pytest.raises(CheckpointError, match="'t' has 6 rows"):
        gather_rows(make("F32", (6, 2)), rows)


def test_a_quantized_vector_does_not_part() -> None:
    with pytest.raises(CheckpointError, match="'t' is a vector of Q8_0 blocks, whose elements do not part"):
        slice_rows(make("Q8_0", (32,)), 0, 1)


def test_a_scalar_has_no_rows() -> None:
    with pytest.raises(CheckpointError, match="'t' is a scalar and has no rows"):
        gather_rows(TensorView("t", "F32", (), memoryview(b"0000")), [0])
