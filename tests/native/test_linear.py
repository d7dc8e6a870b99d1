"""Native linears of every format and variant, against float64 products with exactly dequantized weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

kernels = pytest.importorskip("cardan_native")

from native_bench import from_bits, to_bits  # noqa: E402
from native_linears import DENSE, FLOATS, GROUPED, STEPS, Weight, drawn_view, make, pack, read  # noqa: E402

from cardan.quantization import FORMATS, dequantize  # noqa: E402

VARIANTS = kernels.available()
TOKENS = (0, 1, 2, 3, 5, 8, 9, 16, 17, 33)
OUTER = (1, 7, 16, 31, 37)
DENSE_COLUMNS = (1, 2, 17, 31, 64, 897, 97)


@pytest.fixture(params=VARIANTS)
def native(request):
    module = kernels.load(request.param)
    before = module.threads()
    yield module
    module.set_threads(before)


def columns_of(fmt: str) -> tuple[int, ...]:
    size = FORMATS[fmt].block_elements
    return DENSE_COLUMNS if size == 1 else (size, 3 * size, 1024 + 5 * size)


def rows_of_x(tokens: int, columns: int) -> np.ndarray:
    return np.random.default_rng(tokens).normal(size=(tokens, columns))


def check(weight: Weight, x: np.ndarray, bound: np.ndarray) -> None:
    got, want = weight.apply(x), weight.exact(x)
    assert got.shape == want.shape
    worst = np.abs(got - want) - bound
    assert (worst <= 0).all(), f"{len(x)} rows: off by {np.abs(got - want).max():.3g}, allowed {bound.min():.3g}"


@pytest.mark.parametrize("fmt", [*DENSE, *FLOATS, *GROUPED])
def test_float_activations_give_what_float32_sums_can(native, fmt: str) -> None:
    for index, columns in enumerate(columns_of(fmt)):
        weight = make(native, fmt, (OUTER[index % 5], columns), bias=bool(index % 2), seed=index)
        for tokens in TOKENS:
            x = rows_of_x(tokens, columns)
            check(weight, x, weight.float_bound(x))


@pytest.mark.parametrize("activations", STEPS)
@pytest.mark.parametrize("fmt", GROUPED)
def test_rounded_activations_are_off_by_half_a_step_at_most(native, fmt: str, activations: str) -> None:
    for index, columns in enumerate(columns_of(fmt)):
        shape = (OUTER[index % 5], columns)
        weight = make(native, fmt, shape, activations=activations, bias=bool(index % 2), seed=index)
        for tokens in TOKENS:
            x = rows_of_x(tokens, columns)
            check(weight, x, weight.bound(x, activations))


@pytest.mark.parametrize("activations", STEPS)
@pytest.mark.parametrize("fmt", GROUPED)
def test_activations_that_steps_hold_are_multiplied_exactly(native, fmt: str, activations: str) -> None:
    weight = make(native, fmt, (37, 1024 + 5 * FORMATS[fmt].block_elements), activations=activations, seed=2)
    rng, steps = np.random.default_rng(1), STEPS[activations]
    for tokens in TOKENS:
        x = rng.integers(-steps, steps + 1, (tokens, weight.values.shape[1])).astype(np.float64)
        x[:, ::32] = steps  # so that each group's step is 1
        x[:, 1::32] = -steps
        check(weight, x, weight.float_bound(x))


@pytest.mark.parametrize("activations", STEPS)
@pytest.mark.parametrize("fmt", ["Q4_1", "Q8_0", "AFFINE8_32_F32"])
def test_codes_and_activations_at_their_ends_do_not_overflow(native, fmt: str, activations: str) -> None:
    spec, rng, steps = FORMATS[fmt], np.random.default_rng(7), STEPS[activations]
    drawn = drawn_view(fmt, 32, 512, 8)
    blocks = np.frombuffer(drawn.data, np.uint8).reshape(-1, spec.block_bytes).copy()
    codes = blocks[:, spec.block_bytes - spec.block_elements * spec.bits // 8 :]
    codes[:] = rng.choice(np.array([0x80, 0x7F] if fmt == "Q8_0" else [0x00, 0xFF], np.uint8), codes.shape)
    weight = pack(native, (replace(drawn, data=blocks.reshape(-1).data),), "float32", activations)
    for x in (np.full((9, 512), steps), np.full((9, 512), -steps), rng.choice([-steps, steps], (9, 512))):
        check(weight, x.astype(np.float64), weight.float_bound(x.astype(np.float64)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fmt", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q6_K", "Q8_0"])
def test_narrow_activations(native, fmt: str, dtype: str) -> None:
    columns = columns_of(fmt)[-1]
    for activations in ("float", *(STEPS if fmt in GROUPED else ())):
        weight = make(native, fmt, (37, columns), dtype=dtype, activations=activations, bias=True)
        for tokens in TOKENS:
            x = rows_of_x(tokens, columns)
            check(weight, x, weight.bound(x, activations))


@pytest.mark.parametrize("activations", ["float", "int8", "int16"])
@pytest.mark.parametrize("fmt", ["F32", "BF16", "Q4_1", "Q6_K", "AFFINE8_128_F32"])
def test_many_rows_and_rows_of_several_tensors(native, fmt: str, activations: str) -> None:
    columns = columns_of(fmt)[-1]
    views = tuple(drawn_view(fmt, rows, columns, 3) for rows in (5, 1, 64))
    weight = pack(native, views, "float32", activations, bias=True)
    kind = activations if fmt in GROUPED else "float"
    for tokens in (128, 129, 257):
        x = rows_of_x(tokens, columns)
        check(weight, x, weight.bound(x, kind))


@pytest.mark.parametrize("fmt", [*DENSE, *FLOATS, *GROUPED])
def test_gathered_rows_are_the_checkpoints_own_bit_for_bit(native, fmt: str) -> None:
    columns = columns_of(fmt)[-1]
    view = drawn_view(fmt, 37, columns, 5)
    weight = pack(native, (view,), "float32", "float")
    ids = np.array([36, 0, 17, 17, 1], dtype=np.int32)
    got = np.array(weight.packed.gather(native.Tensor.from_bits(ids, "int32")).bits())
    assert np.array_equal(got.view(np.uint32), dequantize(view)[ids].view(np.uint32))


@pytest.mark.parametrize("fmt", ["F32", "F16", "BF16", "Q4_1"])
def test_gathered_rows_are_rounded_once_to_narrow_activations(native, fmt: str) -> None:
    view = drawn_view(fmt, 20, 64, 6)
    for dtype in ("bfloat16", "float16"):
        packed = pack(native, (view,), dtype, "float").packed
        got = np.array(packed.gather(native.Tensor.from_bits(np.arange(20, dtype=np.int32), "int32")).bits())
        assert np.array_equal(got, to_bits(dequantize(view), dtype))


def test_every_eight_bit_float_is_exact(native) -> None:
    codes = np.arange(256, dtype=np.uint8)
    for fmt in ("F8_E4M3", "F8_E5M2"):
        view = replace(drawn_view(fmt, 1, 1, 0), shape=(8, 32), data=codes.data)
        got = pack(native, (view,), "float32", "float").packed.gather(
            native.Tensor.from_bits(np.arange(8, dtype=np.int32), "int32")
        )
        assert np.array_equal(np.array(got.bits()), dequantize(view), equal_nan=True)


def test_ids_outside_the_table_give_nan_and_touch_nothing(native) -> None:
    weight = make(native, "Q4_0", (20, 64))
    got = read(weight.packed.gather(native.Tensor.from_bits(np.array([-1, 3, 20], dtype=np.int32), "int32")))
    assert np.isnan(got[[0, 2]]).all()
    assert np.isfinite(got[1]).all()


@pytest.mark.parametrize("activations", ["float", "int8", "int16"])
@pytest.mark.parametrize("fmt", ["BF16", "Q4_0"])
def test_residual_and_float32_results(native, fmt: str, activations: str) -> None:
    weight = make(native, fmt, (37, 96), dtype="bfloat16", activations=activations, bias=True)
    for tokens in (1, 9):
        x, residual = rows_of_x(tokens, 96), rows_of_x(tokens + 100, 37)[:tokens]
        plain = read(weight.packed.apply_float32(weight.tensor(x)))
        bound = weight.bound(x, "float" if fmt == "BF16" else activations)
        assert (np.abs(plain - weight.exact(x)) <= bound).all()
        added = weight.packed.apply_add(weight.tensor(x), weight.tensor(residual))
        held = from_bits(to_bits(residual, "bfloat16"), "bfloat16").astype(np.float32)
        assert np.array_equal(np.array(added.bits()), to_bits(plain.astype(np.float32) + held, "bfloat16"))
        assert np.array_equal(np.array(weight.packed.apply(weight.tensor(x)).bits()), to_bits(plain, "bfloat16"))
