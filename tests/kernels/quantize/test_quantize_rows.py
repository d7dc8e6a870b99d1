"""Codes of activations against numpy's rounding, and torch's of floats of 8 bits, in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cardan.errors import UnsupportedError
from cardan_kernels.quantize import LARGEST, quantize_rows

FN, FNUZ, INT8 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8


def activations(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    values = np.random.default_rng(rows).standard_normal((rows, columns)) * np.geomspace(1e-3, 1e3, rows)[:, None]
    return torch.from_numpy(values).to(dtype)


def expected(x: torch.Tensor, dtype: torch.dtype, group: int) -> tuple[torch.Tensor, np.ndarray]:
    """Codes and scales, group by group, of whole numbers to nearest even and of floats as torch rounds them."""
    wide = x.float().numpy()
    scales = np.ones((x.shape[0], -(-x.shape[1] // group)), np.float32)
    codes = np.zeros_like(wide)
    for at in range(scales.shape[1]):
        part = wide[:, at * group : (at + 1) * group]
        size = np.abs(part).max(axis=1)
        scales[:, at] = np.where(size > 0, size / np.float32(LARGEST[dtype]), 1)
        codes[:, at * group : (at + 1) * group] = part / scales[:, at : at + 1]
    codes = np.clip(codes, -LARGEST[dtype], LARGEST[dtype])
    return torch.from_numpy(np.rint(codes) if dtype is INT8 else codes).to(dtype), scales


@pytest.mark.parametrize("dtype", [INT8, FN, FNUZ])
@pytest.mark.parametrize(("given", "columns", "grouped"), [
    (torch.bfloat16, 96, False), (torch.float16, 5000, False), (torch.float32, 300, True), (torch.bfloat16, 1280, True),
])  # fmt: skip
def test_codes_are_rounded_to_nearest_even_in_steps_of_the_largest(
    dtype: torch.dtype, given: torch.dtype, columns: int, grouped: bool
) -> None:
    x = activations(4, columns, given)
    x[1] = 0
    codes, scales = quantize_rows(x, dtype, grouped=grouped)
    want_codes, want_scales = expected(x, dtype, 128 if grouped else columns)
    assert codes.dtype is dtype
    assert np.array_equal(scales.numpy(), want_scales)
    assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))
    assert bool((codes[1].float() == 0).all())
    assert bool((scales[1] == 1).all())


def test_values_come_back_within_half_a_step() -> None:
    x = activations(5, 256, torch.float32)
    codes, scales = quantize_rows(x, INT8)
    back = codes.float() * scales
    assert bool(((back - x).abs() <= 0.5001 * scales).all())
    assert bool((codes.abs().amax(dim=1) == 127).all())


@pytest.mark.parametrize("dtype", [INT8, FN, FNUZ])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("grouped", [False, True])
def test_what_is_no_number_makes_its_scale_nan_and_no_other(dtype: torch.dtype, broken: float, grouped: bool) -> None:
    x = activations(3, 300, torch.float32)
    x[1, 140] = broken
    with np.errstate(invalid="ignore"):
        _, scales = quantize_rows(x, dtype, grouped=grouped)
    assert scales.isnan().nonzero().tolist() == [[1, 1 if grouped else 0]]


def test_codes_go_where_they_are_wanted() -> None:
    x = activations(3, 128, torch.bfloat16)
    codes, scales = torch.empty(3, 128, dtype=INT8), torch.empty(3, 1)
    given = quantize_rows(x, INT8, codes=codes, scales=scales)
    assert given[0] is codes
    assert given[1] is scales
    assert torch.equal(codes, quantize_rows(x, INT8)[0])
    assert quantize_rows(x[:0], INT8)[0].shape == (0, 128)


def test_rows_may_be_part_of_wider_ones() -> None:
    x = activations(3, 256, torch.float16)
    assert torch.equal(quantize_rows(x[:, 128:], INT8)[0], quantize_rows(x[:, 128:].contiguous(), INT8)[0])


def test_other_types_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Codes must be one of int8, float8_e4m3fn, .* got torch.int16 for"):
        quantize_rows(torch.zeros(2, 4), torch.int16)
    with pytest.raises(UnsupportedError, match=r"got torch.int8 for torch.int32"):
        quantize_rows(torch.zeros(2, 4, dtype=torch.int32), INT8)
