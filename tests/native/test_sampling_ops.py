"""Ops of samplers on every variant: long rows cut in pieces, ties, infinities and NaN, in-place sums, noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

cn = pytest.importorskip("cardan_native")

from cardan.ops import definitions, philox  # noqa: E402
from cardan_cpu.native_ops import NativeOps  # noqa: E402

VARIANTS = cn.available()
LONG = 50_003


@pytest.fixture(params=VARIANTS)
def native(request: pytest.FixtureRequest) -> Any:
    kernels = cn.load(request.param)
    kernels.set_threads(2)
    yield kernels
    kernels.set_threads(1)


def tensor(native: Any, values: Any) -> Any:
    return cn.to_tensor(native, np.asarray(values, np.float32))


def integers(native: Any, values: Any) -> Any:
    return cn.to_tensor(native, np.asarray(values, np.int32))


def coarse(*shape: int, seed: int = 0, steps: float = 8.0) -> np.ndarray:
    """Rows with many ties."""
    return (np.round(np.random.default_rng(seed).normal(size=shape) * steps) / 4.0).astype(np.float32)


# --- the largest ---


@pytest.mark.parametrize("width", [1, 5, 127, 128, 129, 8191, 8192, 8193, LONG])
@pytest.mark.parametrize("steps", [0.0, 2.0, 1e6])
def test_the_largest_of_rows_of_any_length_and_with_any_ties(native, width: int, steps: float) -> None:
    x = coarse(3, width, steps=steps)
    there = tensor(native, x)
    np.testing.assert_array_equal(cn.to_array(native.argmax(there)), x.argmax(-1))
    for k in sorted({1, min(2, width), min(64, width), min(700, width), min(30_000, width), width}):
        values, ids = native.topk(there, k)
        want_values, want_ids = definitions.topk(x, k)
        np.testing.assert_array_equal(cn.to_array(ids), want_ids)
        np.testing.assert_array_equal(cn.to_array(values), want_values)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 3), width=st.integers(1, 3000), levels=st.integers(1, 50), share=st.floats(0, 1),
    seed=st.integers(0, 2**31), data=st.data(),
)  # fmt: skip
def test_topk_of_drawn_rows(
    variant: str, rows: int, width: int, levels: int, share: float, seed: int, data: Any
) -> None:
    """Any ties, any share of ``-inf``, zeros of both signs."""
    native = cn.load(variant)
    rng = np.random.default_rng(seed)
    x = (rng.integers(-levels, levels + 1, (rows, width)) / 4).astype(np.float32)
    x[rng.random((rows, width)) < share] = -np.inf
    x[(x == 0) & (rng.random((rows, width)) < 0.5)] = -0.0
    k = data.draw(st.integers(1, width))
    values, ids = native.topk(tensor(native, x), k)
    want_values, want_ids = definitions.topk(x, k)
    np.testing.assert_array_equal(cn.to_array(ids), want_ids)
    np.testing.assert_array_equal(cn.to_array(values), want_values)


@pytest.mark.parametrize("width", [40, 20_000])
def test_nan_are_passed_over_and_come_last(native, width: int) -> None:
    x = coarse(3, width)
    x[0, ::2] = np.nan
    x[1, :] = np.nan
    x[2, 7:] = np.nan
    there = tensor(native, x)
    np.testing.assert_array_equal(cn.to_array(native.argmax(there)), [np.nanargmax(x[0]), 0, np.nanargmax(x[2])])
    values, ids = (cn.to_array(part) for part in native.topk(there, 12))
    np.testing.assert_array_equal(values[0], np.sort(x[0, 1::2])[::-1][:12])
    assert np.isnan(values[1]).all()
    np.testing.assert_array_equal(np.isnan(values[2]), [False] * 7 + [True] * 5)
    np.testing.assert_array_equal(ids[1], np.arange(12))
    assert len(set(ids[2].tolist())) == 12


def test_rows_of_minus_infinity_have_a_first_entry_too(native) -> None:
    x = np.full((2, 300), -np.inf, np.float32)
    x[1, 0] = np.nan
    np.testing.assert_array_equal(cn.to_array(native.argmax(tensor(native, x))), [0, 1])
    _, ids = native.topk(tensor(native, x[:1]), 3)
    np.testing.assert_array_equal(cn.to_array(ids), [[0, 1, 2]])


# --- sums ---


@pytest.mark.parametrize("width", [1, 7, 64, 8193, LONG])
def test_logsumexp_and_log_softmax_of_long_rows(native, width: int) -> None:
    x = np.random.default_rng(1).normal(size=(3, width)).astype(np.float32) * 20
    x[1, : width // 2] = -np.inf
    wide = x.astype(np.float64)
    want = definitions.logsumexp(wide)
    got = cn.to_array(native.logsumexp(tensor(native, x)))
    np.testing.assert_allclose(got, want, rtol=2**-22, atol=2**-22)
    got = cn.to_array(native.log_softmax(tensor(native, x)))
    np.testing.assert_allclose(got, wide - want[:, None], rtol=2**-22, atol=2**-20)


def test_rows_with_infinities_and_nan(native) -> None:
    x = np.array([[0, -np.inf, 1], [-np.inf] * 3, [np.inf, 0, 1], [np.nan, 0, 1], [1e38, -1e38, 0]], np.float32)
    got = cn.to_array(native.logsumexp(tensor(native, x)))
    np.testing.assert_allclose(got, [np.log1p(np.exp(1.0)), -np.inf, np.inf, np.nan, 1e38], rtol=1e-6)
    with np.errstate(all="ignore"):
        want = definitions.log_softmax(x.astype(np.float64))
    np.testing.assert_allclose(cn.to_array(native.log_softmax(tensor(native, x))), want, rtol=1e-6)


def test_running_sums_do_not_drift(native) -> None:
    shares = np.random.default_rng(2).random((2, LONG))
    x = (shares / shares.sum(-1, keepdims=True)).astype(np.float32)
    want = np.cumsum(x.astype(np.float64), axis=-1)
    np.testing.assert_allclose(cn.to_array(native.cumsum(tensor(native, x))), want, rtol=2**-23)


@pytest.mark.parametrize("width", [1, 20, LONG])
def test_a_single_nan_is_found_anywhere(native, width: int) -> None:
    x = np.zeros((4, width), np.float32)
    x[1, 0], x[3, -1] = np.nan, np.nan
    x[2, -1] = np.inf
    np.testing.assert_array_equal(cn.to_array(native.is_nan(tensor(native, x))), [False, True, False, True])


# --- element by element ---


def right_sides(x: np.ndarray) -> list[Any]:
    return [coarse(*x.shape, seed=9) + np.float32(0.125), coarse(x.shape[0], 1, seed=8) + np.float32(0.125), 0.25]


@pytest.mark.parametrize("width", [1, 33, 9001])
def test_comparisons_and_arithmetic_with_arrays_columns_and_numbers(native, width: int) -> None:
    x = coarse(3, width)
    x[0, 0] = np.nan
    x[1, -1] = -np.inf
    for right in right_sides(x):
        there = right if isinstance(right, float) else tensor(native, right)
        for relation, compare in definitions.COMPARISONS.items():
            got = cn.to_array(native.compare(tensor(native, x), relation, there))
            assert got.dtype == np.bool_
            np.testing.assert_array_equal(got, compare(x, right))
        for operation, compute in definitions.ARITHMETIC.items():
            got = cn.to_array(native.arithmetic(tensor(native, x), operation, there))
            np.testing.assert_array_equal(got, compute(x, np.asarray(right, np.float32)))


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("width", [1, 33, 9001])
def test_choices_by_element_and_by_row(native, dtype: Any, width: int) -> None:
    rng = np.random.default_rng(4)
    a, b = (rng.integers(-99, 99, (3, width)).astype(dtype) for _ in range(2))
    for condition in (rng.random((3, width)) < 0.5, rng.random((3, 1)) < 0.5):
        there = cn.to_tensor(native, condition)
        for right in (b, b[:, :1], 7.0):
            other = right if isinstance(right, float) else cn.to_tensor(native, np.ascontiguousarray(right))
            got = cn.to_array(native.where(there, cn.to_tensor(native, a), other))
            assert got.dtype == dtype
            np.testing.assert_array_equal(got, np.where(condition, a, np.asarray(right, dtype)))


def test_columns_of_floats_and_of_ids(native) -> None:
    index = np.array([[2, 2, 0], [1, 0, 1]], np.int32)
    for x in (coarse(2, 3), np.arange(6, dtype=np.int32).reshape(2, 3)):
        got = cn.to_array(native.take_columns(cn.to_tensor(native, x), integers(native, index)))
        np.testing.assert_array_equal(got, np.take_along_axis(x, index.astype(np.int64), -1))


def test_places_named_twice_are_summed_in_place(native) -> None:
    x = tensor(native, np.zeros((2, 3)))
    memory = x.bits()
    native.scatter_add(x, integers(native, [0, 1, 0]), integers(native, [2, 0, 2]), tensor(native, [1.0, 2.0, 4.0]))
    np.testing.assert_array_equal(memory, [[0, 0, 5], [2, 0, 0]])


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, LONG])
def test_bits_are_unpacked_lowest_first(native, width: int) -> None:
    words = np.random.default_rng(6).integers(-(2**31), 2**31, (3, (width + 31) // 32)).astype(np.int32)
    got = cn.to_array(native.unpack_bits(integers(native, words), width))
    np.testing.assert_array_equal(got, definitions.unpack_bits(words, width))


# --- noise ---

SEEDS = np.array([0, 2**64 - 1, 0x0123456789ABCDEF], np.uint64)
PLACES = np.array([0, 131071, 2**31 - 1], np.int32)


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    return np.abs(got.astype(np.float64) - want) / np.spacing(np.abs(want).astype(np.float32))


@pytest.mark.parametrize("width", [1, 3, 4, 17, 8193, 151_937])
def test_noise_of_all_ids_is_that_of_float64(native, width: int) -> None:
    got = NativeOps(native).to_host(NativeOps(native).gumbel(SEEDS, PLACES, width))
    want = philox.gumbel(SEEDS, PLACES, width)
    assert np.isfinite(got).all()
    assert ulps(got, want.astype(np.float64)).max() <= 1.0
    assert (got == want).mean() > 0.999


def test_noise_of_some_ids_is_that_of_all(native) -> None:
    ops = NativeOps(native)
    ids = np.random.default_rng(7).integers(0, 151_937, (3, 600)).astype(np.int32)
    got = ops.to_host(ops.gumbel(SEEDS, PLACES, integers(native, ids)))
    everything = ops.to_host(ops.gumbel(SEEDS, PLACES, 151_937))
    np.testing.assert_array_equal(got, np.take_along_axis(everything, ids.astype(np.int64), -1))


# --- refusals ---


def test_what_does_not_fit_is_refused_with_what_was_expected(native) -> None:
    x, ids = tensor(native, np.zeros((2, 4))), integers(native, [[0], [1]])
    flags = cn.to_tensor(native, np.zeros((2, 4), np.bool_))
    key, one = integers(native, [[1, 2]]), integers(native, [1])
    line, far, ones = integers(native, [0, 1]), integers(native, [0, 9]), tensor(native, [1, 1])
    for error, call, message in (
        (ValueError, lambda: native.compare(x, "=", 0.0), "relation must be one of <, <=, >, >=, == and !=, got '='"),
        (ValueError, lambda: native.arithmetic(x, "%", 1.0), "operation must be one of .* got '%'"),
        (ValueError, lambda: native.compare(line, "<", 0.0), "compare: a must be float32, got int32"),
        (ValueError, lambda: native.arithmetic(x, "+", line), "arithmetic: b must be float32, got int32"),
        (ValueError, lambda: native.arithmetic(x, "+", tensor(native, np.zeros((1, 4)))), "b must be of the shape of"),
        (ValueError, lambda: native.where(x, x, 0.0), "where: condition must be bool, got float32"),
        (ValueError, lambda: native.where(flags, flags, 0.0), "where: a must be float32 or int32, got bool"),
        (ValueError, lambda: native.where(flags, tensor(native, [[1.0]]), 0.0), r"where: condition must be \[1, 1\]"),
        (ValueError, lambda: native.topk(x, 5), r"topk: x must be at least k = 5 .* columns wide, got float32"),
        (ValueError, lambda: native.topk(x, 0), "topk: x must be at least k = 0"),
        (ValueError, lambda: native.argmax(tensor(native, np.zeros((2, 0)))), "argmax: x must be at least one column"),
        (ValueError, lambda: native.logsumexp(line), "logsumexp: x must be float32, got int32"),
        (IndexError, lambda: native.take_columns(x, integers(native, [[4], [0]])), "index must lie in 0 to 3, got 4"),
        (ValueError, lambda: native.take_columns(x, line), "take_columns: index must be of 2 axes"),
        (IndexError, lambda: native.scatter_add(x, line, far, ones), "columns must lie in 0 to 3, got 9"),
        (IndexError, lambda: native.scatter_add(x, far, line, ones), "rows must lie in 0 to 1, got 9"),
        (ValueError, lambda: native.unpack_bits(ids, 33), "unpack_bits: mask must be at least 2 words wide"),
        (ValueError, lambda: native.gumbel_all(key, line, 4), r"gumbel: positions must be \[1\], got int32 \[2\]"),
        (ValueError, lambda: native.gumbel_all(line, line, 4), "gumbel: seeds must be of 2 axes, got int32"),
        (ValueError, lambda: native.gumbel_all(ids, line, 4), r"gumbel: seeds must be \[2, 2\], got int32 \[2, 1\]"),
        (ValueError, lambda: native.gumbel_all(ones, line, 4), "gumbel: seeds must be int32, got float32"),
        (ValueError, lambda: native.gumbel_all(key, one, -4), "gumbel: ids must be 0 or more, got -4"),
        (ValueError, lambda: native.gumbel(key, one, ids), r"gumbel: ids must be \[1, 1\], got int32 \[2, 1\]"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
