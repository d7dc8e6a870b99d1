"""Linears over codes on both sides against float64, in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from coded_weights import NAMES, drawn

from cardan.errors import UnsupportedError
from cardan.ops.rounding import ROUNDOFF, SMALLEST, gamma
from cardan.quantization import dequantize
from cardan.types import TensorView
from cardan_kernels.linear import ScaledMatrix, pack_coded, scaled_from, scaled_linear

FN, FNUZ, INT8 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def drawn_codes(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    if dtype is INT8:
        return torch.from_numpy(rng.integers(-127, 128, shape).astype(np.int8))
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * 16).to(dtype)


def drawn_scales(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).uniform(0.01, 0.1, shape).astype(np.float32))


def spread(scales: torch.Tensor, inner: int, axis: int) -> np.ndarray:
    """Scales for every element of the inner axis."""
    groups = scales.shape[axis]
    wide = np.repeat(scales.double().numpy(), -(-inner // groups) if groups == 1 else 128, axis=axis)
    return wide[:, :inner] if axis == 1 else wide[:inner]


@pytest.mark.parametrize(
    ("dtype", "rows", "grouped", "out"),
    [
        (INT8, 1, False, BF16),
        (INT8, 70, False, F16),
        (INT8, 5, True, F32),
        (FN, 3, False, BF16),
        (FN, 17, True, BF16),
        (FN, 66, True, F16),
        (FNUZ, 2, False, F16),
        (FNUZ, 19, True, F32),
    ],
)
def test_sums_of_codes_are_scaled_and_rounded_once(
    dtype: torch.dtype, rows: int, grouped: bool, out: torch.dtype
) -> None:
    columns, inner = 19, 256 if grouped else 160
    groups = inner // 128 if grouped else 1
    codes, weights = drawn_codes((rows, inner), dtype, 1), drawn_codes((columns, inner), dtype, 2)
    x_groups = groups if dtype is not INT8 else 1
    x_scales, scales = drawn_scales((rows, x_groups), 3), drawn_scales((groups, columns), 4)
    bias = torch.linspace(-9, 9, columns) if rows % 2 else None
    residual = drawn_scales((rows, columns), 5) * 100 if rows % 2 else None
    weight = ScaledMatrix(weights, scales, inner // groups)
    got = scaled_linear(codes, x_scales, weight, bias, residual, out_dtype=out)
    left = codes.double().numpy() * spread(x_scales, inner, 1)
    right = weights.double().numpy() * spread(scales, inner, 0).T
    ends = 0.0 if bias is None or residual is None else bias.double().numpy() + residual.double().numpy()
    want = left @ right.T + ends
    sizes = np.abs(left) @ np.abs(right).T + np.abs(ends)
    # each product is rounded once with its sum; two scales a group, the ends, and the last rounding
    off = gamma(3 * inner + 2, want.size) * sizes + ROUNDOFF[NAMES[out]] * np.abs(want) + SMALLEST[NAMES[out]]
    assert got.dtype is out
    assert (np.abs(got.double().numpy() - want) <= off).all()


def test_whole_numbers_are_summed_exactly() -> None:
    codes, weights = torch.full((2, 640), 127, dtype=INT8), torch.full((5, 640), -127, dtype=INT8)
    weight = ScaledMatrix(weights, torch.ones(1, 5), 640)
    got = scaled_linear(codes, torch.ones(2, 1), weight, out_dtype=F32)
    assert bool((got == -127 * 127 * 640).all())


@pytest.mark.parametrize("form", [FN, FNUZ])
def test_floats_of_either_form_are_worth_the_same(form: torch.dtype) -> None:
    view = drawn("FP8_64_F32", 4, 128).view
    blocks = np.frombuffer(view.data, np.uint8).reshape(8, 68).copy()
    blocks[0, 4:12] = 0x80  # -0, which is NaN in the other form
    view = TensorView("w", "FP8_64_F32", (4, 128), blocks.reshape(-1).data)
    matrix = scaled_from(pack_coded([view], 128, "cpu"), form)
    assert matrix.codes.dtype is form
    assert matrix.group == 64
    values = matrix.codes.float().numpy() * np.repeat(matrix.scales.T.numpy(), 64, axis=1)
    assert np.array_equal(values, dequantize(view))


def test_signed_bytes_need_no_change() -> None:
    view = drawn("INT8_128_F32_A8", 4, 256).view
    matrix = scaled_from(pack_coded([view], 256, "cpu"), None)
    values = matrix.codes.float().numpy() * np.repeat(matrix.scales.T.numpy(), 128, axis=1)
    assert np.array_equal(values, dequantize(view))
    assert matrix.num_bytes == 4 * 256 + 4 * 2 * 4


@pytest.mark.parametrize("group", [32, 64])
def test_groups_of_the_weight_alone_may_be_smaller(group: int) -> None:
    view = drawn(f"INT8_{group}_F32_A8", 7, 192).view
    matrix = scaled_from(pack_coded([view], 192, "cpu"), None)
    codes, x_scales = drawn_codes((3, 192), INT8, 1), drawn_scales((3, 1), 2)
    got = scaled_linear(codes, x_scales, matrix, out_dtype=F32).double().numpy()
    left, right = codes.double().numpy() * x_scales.double().numpy(), dequantize(view).astype(np.float64)
    assert (np.abs(got - left @ right.T) <= gamma(3 * 192, got.size) * (np.abs(left) @ np.abs(right).T)).all()


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    weight = ScaledMatrix(torch.zeros(4, 64, dtype=INT8), torch.ones(1, 4), 64)
    with pytest.raises(UnsupportedError, match=r"codes must be torch.int8 as the weight's, got torch.float8_e4m3fn"):
        scaled_linear(torch.zeros(2, 64).to(FN), torch.ones(2, 1), weight)
    with pytest.raises(
        UnsupportedError, match=r"scales must be float32 \[2, 1\].*Quantize whole rows or groups of 128"
    ):
        scaled_linear(torch.zeros(2, 64, dtype=INT8), torch.ones(2, 3), weight)
    with pytest.raises(UnsupportedError, match=r"int8, or E4M3 floats on a chip that multiplies them, got FLOAT8"):
        scaled_from(pack_coded([drawn("FP8_32_F32", 2, 32).view], 32, "cpu"), None)
    with pytest.raises(UnsupportedError, match=r"got INT4 for"):
        scaled_from(pack_coded([drawn("Q4_0", 2, 32).view], 32, "cpu"), FN)
