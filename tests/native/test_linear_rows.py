"""What results of native linears must not depend on: other rows, threads, memory around them, strides, recording."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

kernels = pytest.importorskip("cardan_native")

from native_bench import to_bits  # noqa: E402
from native_linears import GROUPED, make  # noqa: E402

from cardan.errors import UnsupportedError  # noqa: E402
from cardan.platform import LinearSpec  # noqa: E402
from cardan.testing.conformance.linear_checks import make_view  # noqa: E402
from cardan_cpu.native_linear import ROUNDINGS, NativeLinear  # noqa: E402

KINDS = tuple(
    (fmt, activations)
    for fmt in ("F32", "F16", "BF16", "F8_E4M3", "Q4_0", "Q4_1", "Q5_1", "Q2_K", "Q6_K", "Q8_0", "AFFINE4_128_F32")
    for activations in ("float", "int8", "int16")
    if fmt in GROUPED or activations == "float"
)
COLUMNS = 1280


@pytest.fixture(params=kernels.available())
def native(request):
    module = kernels.load(request.param)
    before = module.threads()
    yield module
    module.set_threads(before)


def bits(weight, x: np.ndarray) -> np.ndarray:
    return np.array(weight.packed.apply(weight.tensor(x)).bits())


@pytest.mark.parametrize(("fmt", "activations"), KINDS)
def test_the_number_of_threads_changes_nothing(native, fmt: str, activations: str) -> None:
    weight = make(native, fmt, (100, COLUMNS), activations=activations)
    for tokens in (1, 3, 40):
        x = np.random.default_rng(tokens).normal(size=(tokens, COLUMNS))
        native.set_threads(1)
        alone = bits(weight, x)
        for threads in (2, 3):
            native.set_threads(threads)
            assert np.array_equal(bits(weight, x), alone)


@pytest.mark.parametrize(("fmt", "activations"), KINDS)
def test_nan_and_infinity_stay_in_their_row(native, fmt: str, activations: str) -> None:
    weight = make(native, fmt, (40, COLUMNS), activations=activations)
    for tokens in (2, 4, 9, 33):
        x = np.random.default_rng(tokens).normal(size=(tokens, COLUMNS))
        clean = bits(weight, x)
        for poison in (np.nan, np.inf, -np.inf):
            for columns in (slice(77, 78), slice(77, 80), slice(64, 96)):  # of one group, which is whole at last
                x[1, columns] = poison
                got = bits(weight, x)
                others = np.arange(tokens) != 1
                assert np.array_equal(got[others], clean[others])
                assert not np.isfinite(got[1].view(np.float32)).any()


@pytest.mark.parametrize(("fmt", "activations"), KINDS)
def test_a_row_is_the_same_among_others(native, fmt: str, activations: str) -> None:
    weight = make(native, fmt, (40, COLUMNS), activations=activations)
    x = np.random.default_rng(8).normal(size=(33, COLUMNS))
    together = bits(weight, x)
    for tokens in (1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 16):
        assert np.array_equal(bits(weight, x[:tokens]), together[:tokens]), f"{tokens} rows"
        assert np.array_equal(bits(weight, x[-tokens:]), together[-tokens:]), f"the last {tokens} rows"


@pytest.mark.parametrize(("fmt", "activations"), [("BF16", "float"), ("F32", "float"), ("Q4_1", "int16")])
def test_rows_of_several_tasks_are_what_they_are_in_parts(native, fmt: str, activations: str) -> None:
    weight = make(native, fmt, (100, COLUMNS), activations=activations)
    x = np.random.default_rng(8).normal(size=(600, COLUMNS))
    together = bits(weight, x)
    for first, last in ((0, 5), (5, 46), (46, 175), (175, 432), (432, 600)):
        assert np.array_equal(bits(weight, x[first:last]), together[first:last]), f"rows {first} to {last}"


@pytest.mark.parametrize("columns", [1, 5, 15, 16, 17, 33, 63, 70])
@pytest.mark.parametrize("fmt", ["F32", "F16", "BF16", "F8_E5M2"])
def test_memory_around_activations_is_never_read(native, fmt: str, columns: int) -> None:
    for dtype in ("float32", "bfloat16"):
        weight = make(native, fmt, (19, columns), dtype=dtype)
        for tokens in (1, 4, 17):
            wide = np.full((tokens, columns + 64), np.nan)
            x = np.random.default_rng(tokens).normal(size=(tokens, columns))
            wide[:, 32 : 32 + columns] = x
            for size in (tokens * columns, tokens * 19, tokens * (columns + 64)):
                held = native.Tensor.from_bits(np.full(4 * size + 64, np.nan, np.float32), "float32")
                del held
            view = weight.tensor(wide).columns(32, columns)
            got = np.array(weight.packed.apply(view).bits())
            assert np.array_equal(got, bits(weight, x))
            assert np.isfinite(got.view(np.float32) if dtype == "float32" else got & 0x7F80 != 0x7F80).all()


@pytest.mark.parametrize(("fmt", "activations"), KINDS)
def test_a_recorded_linear_runs_again_over_new_activations(native, fmt: str, activations: str) -> None:
    weight = make(native, fmt, (40, COLUMNS), activations=activations)
    rng = np.random.default_rng(9)
    first, second = rng.normal(size=(2, 3, COLUMNS))
    x = weight.tensor(first)
    with native.Graph() as graph:
        out = weight.packed.apply(x)
    x.copy_bits(to_bits(second, "float32"))
    graph.replay()
    assert np.array_equal(np.array(out.bits()), bits(weight, second))


def test_a_graph_keeps_the_weights_that_it_recorded(native) -> None:
    weight = make(native, "Q4_1", (40, 64))
    x = weight.tensor(np.random.default_rng(1).normal(size=(1, 64)))
    with native.Graph() as graph:
        out = weight.packed.apply(x)
    before = np.array(out.bits())
    del weight
    graph.replay()
    assert np.array_equal(np.array(out.bits()), before)


def spec(columns: int = 64, rows: int = 8, quantize: str | None = None) -> LinearSpec:
    return LinearSpec(name="w", out_features=rows, in_features=columns, dtype="float32", quantize=quantize)


def test_float32_activations_are_not_rounded_unless_asked_for(native) -> None:
    view = make_view("Q4_1", 8, 64, np.random.default_rng(0))
    for dtype, rounding in (("float32", "float"), ("bfloat16", "int16"), ("float16", "int16")):
        asked, linear = replace(spec(), dtype=dtype), NativeLinear(native)
        assert linear.pack((view,), asked, None).packed.activations == rounding
        assert (linear.activation_codes("Q4_1", asked) is None) == (rounding == "float")
        for name in ROUNDINGS:
            linear = NativeLinear(native, name)
            assert linear.pack((view,), asked, None).packed.activations == name
            assert (linear.activation_codes("Q4_1", asked) is None) == (name == "float")


def test_claims_say_why_not(native) -> None:
    linear = NativeLinear(native)
    assert linear.claims("Q4_K", spec(256)) is None
    assert linear.claims("I32", spec()).startswith("I32 is none of AFFINE4_128_BF16, ")
    assert linear.claims("Q4_K", spec(128)) == "rows of 128 are no whole blocks of 256"
    assert linear.claims("F32", spec(quantize="q4")) == ("weights are not quantized at load here, and q4 was asked for")


def test_what_cannot_be_packed_is_refused(native) -> None:
    linear, rng = NativeLinear(native), np.random.default_rng(0)
    view = make_view("Q4_0", 8, 64, rng)
    with pytest.raises(UnsupportedError, match=r"cannot be packed for w: rows of 48 are no whole blocks of 32\. Widen"):
        linear.pack((view,), spec(48), None)
    with pytest.raises(UnsupportedError, match=r"w needs 9 rows, but its tensors have 8\. Check the model's config\."):
        linear.pack((view,), spec(rows=9), None)
    with pytest.raises(UnsupportedError, match=r"w has tensors of Q4_0, Q8_0\. Pack one format at a time\."):
        linear.pack((view, make_view("Q8_0", 8, 64, rng)), spec(rows=16), None)
    with pytest.raises(UnsupportedError, match=r"activations must be one of auto, float, int16, int8, got 'int4'\."):
        NativeLinear(native, "int4")


def test_the_kernels_refuse_what_does_not_fit(native) -> None:
    weight = make(native, "Q4_0", (8, 64)).packed.packed
    x = native.Tensor.zeros((2, 32), "float32")
    with pytest.raises(ValueError, match=r"linear: x must be of 64 columns, as the weight has, got float32 \[2, 32\]"):
        native.linear(x, weight)
    x = native.Tensor.zeros((2, 64), "float32")
    with pytest.raises(ValueError, match=r"linear_add: residual must be \[2, 8\], got float32 \[2, 9\]"):
        native.linear_add(x, weight, native.Tensor.zeros((2, 9), "float32"))
    with pytest.raises(ValueError, match=r"linear takes float32, bfloat16 or float16, got int32"):
        native.linear(native.Tensor.zeros((2, 64), "int32"), weight)
    raw = [np.zeros(36, np.uint8)]
    with pytest.raises(ValueError, match=r"2 rows of Q4_0 must be 36 bytes, got 18"):
        native.pack_linear("Q4_0", [raw[0][:18]], [2], 32, "float32")
    with pytest.raises(ValueError, match=r"in_features must be a multiple of 32 for Q4_0, got 33"):
        native.pack_linear("Q4_0", raw, [2], 33, "float32")
    with pytest.raises(ValueError, match=r"no linear here takes the format Q9"):
        native.pack_linear("Q9", raw, [2], 32, "float32")
    with pytest.raises(ValueError, match=r"activations must be int8, int16 or float, got 'int4'"):
        native.pack_linear("Q4_0", raw, [2], 32, "float32", None, "int4")
    with pytest.raises(ValueError, match=r"1 parts need as many counts of rows, got 2"):
        native.pack_linear("Q4_0", raw, [2, 3], 32, "float32")
