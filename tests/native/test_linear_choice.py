"""At how many rows native linears change from one kernel to another: who says it, and that results stay the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import numpy as np
import pytest

kernels = pytest.importorskip("cardan_native")

from native_bench import from_bits, to_bits  # noqa: E402
from native_linears import drawn_view  # noqa: E402

from cardan.platform import LinearSpec  # noqa: E402
from cardan.quantization import dequantize, format_spec  # noqa: E402
from cardan_cpu.native_crossovers import crossover_ranges, default_crossovers  # noqa: E402
from cardan_cpu.native_linear import ROUNDINGS, NativeLinear  # noqa: E402
from cardan_cpu.native_tuning import all_ranges  # noqa: E402

FORMATS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q6_K", "Q8_0", "AFFINE4_128_F32")
KINDS = [
    (fmt, rounding) for fmt in FORMATS for rounding in (ROUNDINGS if fmt not in ("F32", "F16", "BF16") else ("float",))
]
COLUMNS = 1280


@pytest.fixture(params=kernels.available())
def native(request: pytest.FixtureRequest) -> Any:
    return kernels.load(request.param)


def pack(native: Any, fmt: str, rounding: str, crossovers: Mapping[str, int], dtype: str = "float32") -> Any:
    spec = LinearSpec(name="w", out_features=40, in_features=COLUMNS, dtype=dtype)
    return NativeLinear(native, rounding, crossovers).pack((drawn_view(fmt, 40, COLUMNS, 1),), spec, None)


def test_the_package_says_where_each_kernel_begins(native: Any) -> None:
    ranges, defaults = all_ranges(native), default_crossovers(native.VARIANT)
    assert defaults.keys() == ranges.keys()
    for name, (least, most) in ranges.items():
        assert least <= defaults[name] <= most, name


def test_the_package_begins_kernels_where_the_module_does(native: Any) -> None:
    usual: dict[str, int] = {}
    for fmt in native.packable_formats():
        raw = np.zeros(16 * 256 // format_spec(fmt).block_elements * format_spec(fmt).block_bytes, np.uint8)
        for rounding in ROUNDINGS:
            packed = native.pack_linear(fmt, [raw], [16], 256, "float32", None, rounding, {})
            usual |= {name: number for name, (_, _, number) in packed.crossovers.items()}
    for name, number in default_crossovers(native.VARIANT).items():
        assert usual[name] == number, name


def test_the_package_has_a_table_for_every_variant() -> None:
    text = (resources.files("cardan_cpu") / "crossovers.json").read_text()
    assert set(json.loads(text)) == set(kernels.VARIANTS)
    assert all(default_crossovers(variant) for variant in kernels.VARIANTS)


@pytest.mark.parametrize(("fmt", "rounding"), KINDS)
def test_the_numbers_choose_the_kernel(native: Any, fmt: str, rounding: str) -> None:
    ranges = crossover_ranges(native, fmt, rounding)
    (few,) = (name for name in ranges if name.endswith(".few"))
    many = [name for name in ranges if name.endswith(".many")]
    numbers = {few: 2, **dict.fromkeys(many, 7)}
    packed = pack(native, fmt, rounding, numbers).packed
    assert {name: packed.crossovers[name][2] for name in numbers} == numbers
    taken = [native.linear_kernel(packed, rows) for rows in range(1, 9)]
    assert taken == ["registers"] * 2 + ["cache"] * 4 + ["many" if many else "cache"] * 2
    default = pack(native, fmt, rounding, {}).packed
    first = default_crossovers(native.VARIANT)[few]
    assert native.linear_kernel(default, first) == "registers"
    assert native.linear_kernel(default, first + 1) in ("cache", "many")


@pytest.mark.parametrize(("fmt", "rounding"), KINDS)
def test_results_are_the_same_bit_for_bit_whatever_kernel_is_taken(native: Any, fmt: str, rounding: str) -> None:
    ranges = crossover_ranges(native, fmt, rounding)
    seldom = {name: most if name.endswith(".many") else least for name, (least, most) in ranges.items()}
    often = {name: least if name.endswith(".many") else most for name, (least, most) in ranges.items()}
    registers = {**seldom, **{name: often[name] for name in ranges if name.endswith(".few")}}
    weights = [pack(native, fmt, rounding, numbers) for numbers in (seldom, often, registers, {})]
    for rows in (1, 2, 3, 4, 5, 6, 7, 9, 33):
        bits = to_bits(np.random.default_rng(rows).normal(size=(rows, COLUMNS)), "float32")
        x = native.Tensor.from_bits(bits, "float32")
        first, *others = (np.array(weight.apply(x).bits()) for weight in weights)
        for other in others:
            assert np.array_equal(other, first), rows


def test_tiles_for_bfloat16_begin_where_they_are_told_to(native: Any) -> None:
    name = "bf16-float.many"
    if name not in all_ranges(native):
        assert native.VARIANT != "amx"
        pytest.skip(f"{native.VARIANT} has no tiles")
    packed = pack(native, "BF16", "float", {name: 9}, "bfloat16").packed
    assert [native.linear_kernel(packed, rows) for rows in (8, 9)] == ["cache", "many"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_columns_that_fill_no_tile_are_packed_and_have_no_kernel_for_many(native: Any, dtype: str) -> None:
    """The package's table names a crossover that this weight has no choice for."""
    view = drawn_view("BF16", 40, 33, 1)
    spec = LinearSpec(name="w", out_features=40, in_features=33, dtype=dtype)
    weights = [
        NativeLinear(native, "float", numbers).pack((view,), spec, None) for numbers in ({}, {"bf16-float.many": 17})
    ]
    ones = native.Tensor.from_bits(to_bits(np.ones((40, 33)), dtype), dtype)
    exact = dequantize(view).sum(axis=1)
    for weight in weights:
        assert "many" not in {native.linear_kernel(weight.packed, rows) for rows in (1, 16, 17, 2048)}
        got = from_bits(np.array(weight.apply_float32(ones).bits()), "float32")
        np.testing.assert_allclose(got, np.tile(exact, (40, 1)), rtol=1e-5, atol=1e-5)


def test_numbers_out_of_their_bounds_are_refused(native: Any) -> None:
    with pytest.raises(ValueError, match=r"crossover nibble-float\.few must be between 0 and \d+, got 99"):
        pack(native, "Q4_0", "float", {"nibble-float.few": 99})
    with pytest.raises(ValueError, match=r"crossover f32-float\.few must be between 0 and 4, got -1"):
        pack(native, "F32", "float", {"f32-float.few": -1})
