"""Linears over codes against float64, in the interpreter: codings, paths and ends, and sizes that no tile divides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from coded_weights import allowed, drawn

from cardan.errors import UnsupportedError
from cardan.quantization import dequantize
from cardan.types import TensorView
from cardan_kernels.linear import LAYOUTS, Coding, coded_linear, coded_rows, pack_coded

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CASES = (
    ("Q4_0", 1, BF16),
    ("Q4_0", 20, F16),
    ("Q4_1", 3, F32),
    ("Q4_1", 33, BF16),
    ("Q8_0", 2, F16),
    ("Q8_0", 9, F32),
    ("MXFP4", 1, F32),
    ("MXFP4", 12, BF16),
    ("INT4_128_F16", 8, BF16),
    ("INT4_128_F16", 70, BF16),
    ("INT4_64_BF16", 9, F16),
    ("AFFINE4_64_BF16", 5, BF16),
    ("AFFINE4_128_F32", 10, F16),
    ("AFFINE4_32_F16", 1, F16),
    ("AFFINE8_32_F16", 4, BF16),
    ("AFFINE8_64_F32", 16, BF16),
    ("INT8_64_F32", 7, F32),
    ("FP8_128_F32", 2, BF16),
    ("FP8_32_F32", 34, F16),
)


def activations(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, columns))).to(dtype)


def exact_sum(x: torch.Tensor, values: np.ndarray, *ends: torch.Tensor | None) -> np.ndarray:
    total = x.double().numpy() @ values.T
    for end in ends:
        total = total if end is None else total + end.double().numpy()
    return total


@pytest.mark.parametrize(("fmt", "rows", "dtype"), CASES)
def test_a_linear_over_codes_sums_in_float32_and_rounds_once(fmt: str, rows: int, dtype: torch.dtype) -> None:
    columns, inner = 21, 3 * max(LAYOUTS[fmt].elements, 64)
    weight = drawn(fmt, columns, inner)
    x = activations(rows, inner, dtype)
    with_ends = rows % 2 == 1
    bias = activations(1, columns, dtype, 2)[0] if with_ends else None
    residual = activations(rows, columns, dtype, 3) if with_ends else None
    got = coded_linear(x, pack_coded([weight.view], inner, "cpu"), bias, residual)
    want = exact_sum(x, weight.values, bias, residual)
    ends = sum(np.abs(end.double().numpy()) for end in (bias, residual) if end is not None)
    assert got.dtype is dtype
    assert (np.abs(got.double().numpy() - want) <= allowed(x, weight, want, ends, dtype)).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("fmt", sorted(LAYOUTS))
@pytest.mark.parametrize("rows", [1, 2, 6, 40])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_every_format_in_every_type(fmt: str, rows: int, dtype: torch.dtype) -> None:
    inner = 5 * LAYOUTS[fmt].elements
    weight = drawn(fmt, 70, inner, seed=rows)
    x = activations(rows, inner, dtype)
    got = coded_linear(x, pack_coded([weight.view], inner, "cpu"))
    want = exact_sum(x, weight.values)
    assert (np.abs(got.double().numpy() - want) <= allowed(x, weight, want, 0.0, dtype)).all()


@pytest.mark.parametrize("fmt", sorted(LAYOUTS))
def test_every_format_keeps_its_values(fmt: str) -> None:
    inner = 3 * LAYOUTS[fmt].elements
    weight = drawn(fmt, 5, inner)
    matrix = pack_coded([weight.view], inner, "cpu")
    ids = torch.tensor([4, 0, 2, 2], dtype=torch.int32)
    got = coded_rows(ids, matrix, F32).numpy()
    assert np.array_equal(got, dequantize(weight.view)[[4, 0, 2, 2]])


def test_every_exponent_of_a_scale_of_one_byte_keeps_its_value_and_255_is_nan() -> None:
    blocks = np.full((256, 17), 0x2A, np.uint8)
    blocks[:, 0] = np.arange(256)
    view = TensorView("w", "MXFP4", (256, 32), blocks.tobytes())
    with np.errstate(over="ignore"):
        want = dequantize(view).reshape(256, 32)
        got = coded_rows(torch.arange(256, dtype=torch.int32), pack_coded([view], 32, "cpu"), F32).numpy()
    assert np.isnan(want[255]).all()
    assert np.array_equal(got, want, equal_nan=True)


def test_rows_of_several_tensors_stand_one_after_the_other() -> None:
    parts = [drawn("AFFINE4_32_BF16", rows, 64, seed=rows) for rows in (3, 1, 6)]
    matrix = pack_coded([part.view for part in parts], 64, "cpu")
    got = coded_rows(torch.arange(10, dtype=torch.int32), matrix, F32).numpy()
    assert np.array_equal(got, np.concatenate([dequantize(part.view) for part in parts]))
    assert matrix.num_bytes == 10 * 64 // 2 + 10 * 2 * 2 * 2


@pytest.mark.parametrize("rows", [2, 12])
def test_columns_in_act_order_multiply_activations_in_that_order(rows: int) -> None:
    plain = drawn("INT4_128_F16", 9, 256)
    order = np.random.default_rng(5).permutation(256).astype(np.int32)
    ordered = TensorView("w", plain.view.dtype, plain.view.shape, plain.view.data, order)
    x = activations(rows, 256, BF16)
    got = coded_linear(x[:, torch.from_numpy(order).long()].contiguous(), pack_coded([ordered], 256, "cpu"))
    want = x.double().numpy() @ dequantize(ordered).astype(np.float64).T
    taken = x[:, torch.from_numpy(order).long()]
    assert (np.abs(got.double().numpy() - want) <= allowed(taken, plain, want, 0.0, BF16)).all()


@pytest.mark.parametrize("rows", [1, 11])
def test_a_scale_that_a_whole_row_shares_is_kept_once(rows: int) -> None:
    weight = drawn("INT8_32_F32", 6, 96)
    blocks = np.frombuffer(weight.view.data, np.uint8).reshape(6, 3, 36).copy()
    blocks[:, :, :4] = blocks[:, :1, :4]
    view = TensorView("w", "INT8_32_F32", (6, 96), blocks.reshape(-1).data)
    matrix = pack_coded([view], 96, "cpu")
    assert (matrix.group, tuple(matrix.scales.shape)) == (96, (1, 6))
    x = activations(rows, 96, F32)
    want = x.double().numpy() @ dequantize(view).astype(np.float64).T
    sizes = np.abs(x.double().numpy()) @ np.abs(dequantize(view)).astype(np.float64).T
    assert (np.abs(coded_linear(x, matrix).double().numpy() - want) <= 96 * 2.0**-23 * sizes).all()


@pytest.mark.parametrize("rows", [3, 14])
def test_results_go_where_they_are_wanted_in_the_type_that_stands_there(rows: int) -> None:
    weight = drawn("Q8_0", 10, 64)
    matrix = pack_coded([weight.view], 64, "cpu")
    x = activations(rows, 64, BF16)
    wide = torch.full((rows, 16), 7.0)
    given = coded_linear(x, matrix, out=wide[:, 3:13])
    assert given.data_ptr() == wide[:, 3:13].data_ptr()
    assert bool((wide[:, :3] == 7).all() and (wide[:, 13:] == 7).all())
    assert torch.equal(wide[:, 3:13], coded_linear(x, matrix, out_dtype=F32))


@pytest.mark.parametrize("rows", [2, 10])
def test_a_residual_may_be_overwritten_by_the_sum(rows: int) -> None:
    matrix = pack_coded([drawn("Q4_0", 10, 64).view], 64, "cpu")
    x, residual = activations(rows, 64, F32), activations(rows, 10, F32, 4)
    want = coded_linear(x, matrix, None, residual)
    coded_linear(x, matrix, None, residual, out=residual)
    assert torch.equal(residual, want)


def test_no_rows_are_no_work() -> None:
    matrix = pack_coded([drawn("Q4_0", 10, 64).view], 64, "cpu")
    assert coded_linear(torch.zeros(0, 64), matrix).shape == (0, 10)
    assert coded_rows(torch.zeros(0, dtype=torch.int32), matrix, F32).shape == (0, 64)


def test_codes_of_four_bits_are_halves_of_bytes_sixteen_apart() -> None:
    view = drawn("INT4_64_F32", 2, 64).view
    matrix = pack_coded([view], 64, "cpu")
    scale = matrix.scales.T.numpy()
    low, high = matrix.codes.numpy() & 15, matrix.codes.numpy() >> 4
    units = [part.astype(np.float32).reshape(2, 2, 16) - 8 for part in (low, high)]
    values = np.stack(units, axis=2).reshape(2, 64) * scale
    assert matrix.coding is Coding.INT4
    assert np.array_equal(values, dequantize(view))


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    view = drawn("Q4_0", 10, 64).view
    matrix = pack_coded([view], 64, "cpu")
    x = torch.zeros(2, 64)
    with pytest.raises(UnsupportedError, match=r"is Q4_K, and kernels take Q4_0, Q4_1.* Widen it first"):
        pack_coded([TensorView("w", "Q4_K", (1, 256), memoryview(bytes(144)))], 256, "cpu")
    with pytest.raises(UnsupportedError, match="w must be Q4_0 in rows of 64, whole blocks of 32, got Q4_0"):
        pack_coded([TensorView("w", "Q4_0", (10, 64), memoryview(bytes(5)))], 64, "cpu")
    with pytest.raises(UnsupportedError, match="w holds NaN among its floats of 8 bits"):
        pack_coded([TensorView("w", "FP8_32_F32", (1, 32), memoryview(bytes(4) + b"\xff" * 32))], 32, "cpu")
    with pytest.raises(UnsupportedError, match=r"x must be bfloat16, float16, float32, got torch.int32"):
        coded_linear(x.int(), matrix)
    with pytest.raises(UnsupportedError, match=r"x must be \[rows, 64\] with contiguous rows, got \[2, 32\]"):
        coded_linear(x[:, :32], matrix)
    with pytest.raises(UnsupportedError, match=r"bias must be .* \[10\], got torch.float32 \[9\]"):
        coded_linear(x, matrix, torch.zeros(9))
    with pytest.raises(UnsupportedError, match=r"residual must be .* \[2, 10\] with contiguous rows"):
        coded_linear(x, matrix, None, torch.zeros(3, 10))
    with pytest.raises(UnsupportedError, match=r"out must be .* \[2, 10\] with contiguous rows, got torch.int8"):
        coded_linear(x, matrix, out=torch.zeros(2, 10, dtype=torch.int8))
