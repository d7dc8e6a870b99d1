"""Vectors of floats: what they round to and what their functions give, against numpy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

cn = pytest.importorskip("cardan_native")

VARIANTS = cn.available()
EDGES = [0.0, 1.0, 0.5, 2.0, 65504.0, 65519.996, 65520.0, 1e5, 3.4e38, 2.0**-14, 2.0**-24, 2.0**-25, 2.9802322e-08]
EDGES += [1e-40, 1e-45, 5.9e-8, 6.1e-5, 0.1, 1 / 3, math.inf, math.nan]
SPECIALS = np.array(EDGES + [-value for value in EDGES], np.float32)


def every_pattern_of_bits(count: int) -> np.ndarray:
    """Floats of all sizes and signs, NaN and denormals among them, and those halfway between narrow ones."""
    rng = np.random.default_rng(3)
    drawn = rng.integers(0, 2**32, count, dtype=np.uint32)
    halfway = (drawn & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    finer = (drawn & np.uint32(0xFFFFE000)) | np.uint32(0x1000)
    return np.concatenate((SPECIALS.view(np.uint32), drawn, halfway, finer)).view(np.float32)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest even by numpy's integers; NaN are 0x7FC0."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def without_nan_payload(bits: np.ndarray, exponent: int, quiet: int) -> np.ndarray:
    nan = (bits & 0x7FFF) > exponent
    return np.where(nan, quiet, bits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_rounds_to_nearest_even_to_the_last_bit(variant: str) -> None:
    native = cn.load(variant)
    values = every_pattern_of_bits(200_000)
    got = native.cast(cn.to_tensor(native, values), "bfloat16").bits()
    np.testing.assert_array_equal(without_nan_payload(got, 0x7F80, 0x7FC0), bfloat16_bits(values))


@pytest.mark.parametrize("variant", VARIANTS)
def test_float16_rounds_to_nearest_even_to_the_last_bit(variant: str) -> None:
    native = cn.load(variant)
    values = every_pattern_of_bits(200_000)
    got = native.cast(cn.to_tensor(native, values), "float16").bits()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        want = values.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(without_nan_payload(got, 0x7C00, 0x7E00), without_nan_payload(want, 0x7C00, 0x7E00))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("width", [1, 3, 16, 17, 65536])
def test_every_narrow_float_widens_exactly(variant: str, width: int) -> None:
    native = cn.load(variant)
    patterns = np.arange(65536, dtype=np.uint16)[-width:]
    halves = cn.to_array(native.cast(native.Tensor.from_bits(patterns, "float16"), "float32"))
    np.testing.assert_array_equal(halves, patterns.view(np.float16).astype(np.float32))
    wide = cn.to_array(native.cast(native.Tensor.from_bits(patterns, "bfloat16"), "float32"))
    np.testing.assert_array_equal(wide, (patterns.astype(np.uint32) << 16).view(np.float32))


def units_in_last_place(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """How far float32 results are from float64 ones, in spacings of float32."""
    finite = np.isfinite(want) & (np.abs(want) < np.finfo(np.float32).max)
    place = np.spacing(np.maximum(np.abs(want[finite]), np.finfo(np.float32).tiny).astype(np.float32))
    return np.abs(got[finite].astype(np.float64) - want[finite]) / place


def arguments(low: float, high: float) -> np.ndarray:
    rng = np.random.default_rng(1)
    small = 10.0 ** rng.uniform(-40, 1, 20_000) * rng.choice((-1.0, 1.0), 20_000)
    values = np.concatenate((rng.uniform(low, high, 100_000), rng.uniform(-1, 1, 50_000), small))
    return values[(values >= low) & (values <= high)].astype(np.float32)


def native_exp(native: object, x: np.ndarray) -> np.ndarray:
    return cn.to_array(native.exp(cn.to_tensor(native, x)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("variant", VARIANTS)
def test_exp_is_within_2_units(variant: str) -> None:
    native = cn.load(variant)
    borders = np.linspace((-87.3365, 88.7218), (-87.3355, 88.7228), 1001, dtype=np.float32)
    x = np.concatenate((arguments(-87.3, 88.72), borders.ravel()))
    assert units_in_last_place(native_exp(native, x), np.exp(x.astype(np.float64))).max() <= 2.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_exp_of_what_is_too_large_too_small_or_no_number(variant: str) -> None:
    native = cn.load(variant)
    x = np.array([-np.inf, -1e30, -104.0, -87.34, 88.73, 1e30, np.inf, np.nan, 0.0, -0.0, 1e-45], np.float32)
    want = np.array([0, 0, 0, 0, np.inf, np.inf, np.inf, np.nan, 1, 1, 1], np.float32)
    np.testing.assert_array_equal(native_exp(native, x), want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tanh_is_within_4_units(variant: str) -> None:
    native = cn.load(variant)
    x = arguments(-30.0, 30.0)
    got = cn.to_array(native.tanh_softcap(cn.to_tensor(native, x), 1.0))
    assert units_in_last_place(got, np.tanh(x.astype(np.float64))).max() <= 4.0
    ends = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e30, -1e30], np.float32)
    got = cn.to_array(native.tanh_softcap(cn.to_tensor(native, ends), 1.0))
    np.testing.assert_array_equal(got, np.tanh(ends))
    np.testing.assert_array_equal(np.signbit(got[3:5]), [False, True])


@pytest.mark.parametrize("variant", VARIANTS)
def test_sigmoid_is_within_4_units(variant: str) -> None:
    """``x * sigmoid(x)`` adds one rounding of its own."""
    native = cn.load(variant)
    x = arguments(-80.0, 80.0)
    wide = x.astype(np.float64)
    got = cn.to_array(native.silu(cn.to_tensor(native, x)))
    assert units_in_last_place(got, wide / (1.0 + np.exp(-wide))).max() <= 5.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_normal_distribution_is_within_its_bounds(variant: str) -> None:
    native = cn.load(variant)
    x = arguments(-12.0, 12.0)
    wide = x.astype(np.float64)
    distribution = np.array([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in wide])
    got = cn.to_array(native.gelu(cn.to_tensor(native, x), False)).astype(np.float64)
    assert (np.abs(got - wide * distribution) <= np.abs(wide) * 2e-7 + 1e-44).all()
    low = distribution < 0.16
    off = units_in_last_place(got[low].astype(np.float32), (wide * distribution)[low])
    assert (off <= 9.0 + wide[low] ** 2 / 2).all()


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=40, deadline=None)
@given(width=st.integers(1, 70), seed=st.integers(0, 1000))
def test_a_value_does_not_depend_on_where_it_stands(variant: str, width: int, seed: int) -> None:
    native = cn.load(variant)
    x = np.random.default_rng(seed).normal(size=width).astype(np.float32) * 5
    alone = np.concatenate([native_exp(native, x[i : i + 1]) for i in range(width)])
    np.testing.assert_array_equal(native_exp(native, x), alone)
