"""Ops of layers: every spec on every variant, views with gaps, rows on several threads, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

cn = pytest.importorskip("cardan_native")

from cardan.ops import OP_SPECS, run_case  # noqa: E402
from cardan.ops.definitions import gelu, layer_norm, rms_norm, rope, silu  # noqa: E402
from cardan.platform import LinearSpec  # noqa: E402
from cardan.types import TensorView  # noqa: E402
from cardan_cpu.native_linear import NativeLinear  # noqa: E402
from cardan_cpu.native_ops import NativeOps  # noqa: E402

VARIANTS = cn.available()
SINGLE = 2.0**-24


@pytest.fixture(params=VARIANTS)
def native(request: pytest.FixtureRequest) -> Any:
    kernels = cn.load(request.param)
    kernels.set_threads(2)
    yield kernels
    kernels.set_threads(1)


def tensor(native: Any, values: Any, dtype: str = "float32") -> Any:
    x = cn.to_tensor(native, np.asarray(values, np.float32))
    return native.cast(x, dtype)


def integers(native: Any, values: Any) -> Any:
    return cn.to_tensor(native, np.asarray(values, np.int32))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def packer(native: Any) -> Any:
    """Packs dense values, for the specs of ``linear`` and ``embed``."""

    def pack(values: np.ndarray, bias: np.ndarray | None, dtype: str) -> Any:
        rows = np.ascontiguousarray(values, np.float32)
        view = TensorView("w", "F32", rows.shape, rows.reshape(-1).view(np.uint8).data)
        spec = LinearSpec(name="w", out_features=rows.shape[0], in_features=rows.shape[1], dtype=dtype)
        return NativeLinear(native).pack((view,), spec, None if bias is None else tensor(native, bias))

    return pack


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, spec in OP_SPECS.items() for dtype in spec.dtypes])
def test_every_op_does_what_its_spec_says(native, name: str, dtype: str) -> None:
    spec = OP_SPECS[name]
    for arguments in spec.cases(np.random.default_rng(5)):
        with np.errstate(all="ignore"):
            trial = run_case(NativeOps(native), spec, arguments, dtype, packer(native))
        assert trial.excess <= 1, arguments


# --- views ---


@pytest.fixture
def heads() -> np.ndarray:
    """Three heads of five features out of the middle of 23 columns."""
    return normal(4, 23)


def view_of(native: Any, array: np.ndarray) -> tuple[Any, np.ndarray]:
    return tensor(native, array).columns(4, 15).split_heads(3), array[:, 4:19].reshape(4, 3, 5)


def test_norms_read_views(native, heads: np.ndarray) -> None:
    x, values = view_of(native, heads)
    weight, bias = normal(5, seed=1), normal(5, seed=2)
    wide = values.astype(np.float64)
    got = cn.to_array(native.rms_norm(x, tensor(native, weight), 1e-5))
    np.testing.assert_allclose(got, rms_norm(wide, weight.astype(np.float64), 1e-5), rtol=1e-5, atol=1e-6)
    got = cn.to_array(native.layer_norm(x, tensor(native, weight), tensor(native, bias), 1e-5))
    np.testing.assert_allclose(got, layer_norm(wide, weight, bias, 1e-5), rtol=1e-5, atol=1e-6)
    normed, total = native.add_rms_norm(x, x, tensor(native, weight), 1e-5)
    np.testing.assert_array_equal(cn.to_array(total), values + values)
    np.testing.assert_allclose(cn.to_array(normed), rms_norm(2 * wide, weight, 1e-5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_reads_views_and_leaves_the_rest_of_a_head(native, heads: np.ndarray, interleaved: bool) -> None:
    x, values = view_of(native, heads)
    angles = np.random.default_rng(3).uniform(0, 6, (50, 2)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    positions = np.array([7, 0, 49, 7], np.int32)
    tables = tensor(native, cos), tensor(native, sin)
    got = cn.to_array(native.rope(x, integers(native, positions), *tables, interleaved))
    np.testing.assert_allclose(got, rope(values, positions, cos, sin, interleaved), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[..., 4], values[..., 4])


def test_elementwise_ops_casts_and_copies_read_views(native, heads: np.ndarray) -> None:
    x, values = view_of(native, heads)
    row = normal(3, 5, seed=4)
    np.testing.assert_array_equal(cn.to_array(native.add(x, x)), values + values)
    np.testing.assert_array_equal(cn.to_array(native.mul(x, tensor(native, row))), values * row)
    np.testing.assert_array_equal(cn.to_array(native.scale(x, 3.0)), values * np.float32(3.0))
    np.testing.assert_allclose(cn.to_array(native.silu(x)), silu(values), rtol=1e-5)
    np.testing.assert_allclose(cn.to_array(native.gelu(x, True)), gelu(values, True), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(cn.to_array(native.cast(x, "float16")), values.astype(np.float16))
    np.testing.assert_array_equal(cn.to_array(x.contiguous()), values)
    np.testing.assert_array_equal(cn.to_array(native.concat([x, x])), np.concatenate((values, values), -1))
    np.testing.assert_array_equal(cn.to_array(native.gather_rows(x, integers(native, [3, 0]))), values[[3, 0]])


def test_gates_stand_before_what_they_gate(native) -> None:
    x = normal(5, 3 * 90)
    part = tensor(native, x).columns(90, 180)
    gate, up = x[:, 90:180].astype(np.float64), x[:, 180:].astype(np.float64)
    np.testing.assert_allclose(cn.to_array(native.silu_mul(part, 90)), silu(gate) * up, rtol=1e-5, atol=1e-6)
    for approximate in (False, True):
        got = cn.to_array(native.gelu_mul(part, 90, approximate))
        np.testing.assert_allclose(got, gelu(gate, approximate) * up, rtol=2e-5, atol=1e-6)


# --- many rows, long rows ---


@pytest.mark.parametrize("shape", [(1, 100_003), (700, 65), (3, 8193)])
def test_work_that_is_cut_in_pieces_gives_whole_results(native, shape: tuple[int, int]) -> None:
    x = normal(*shape)
    there = tensor(native, x)
    np.testing.assert_array_equal(cn.to_array(native.add(there, there)), x + x)
    np.testing.assert_array_equal(cn.to_array(native.mul(there, tensor(native, x[0]))), x * x[0])
    np.testing.assert_array_equal(cn.to_array(native.cast(there, "float16")), x.astype(np.float16))
    weight = normal(shape[1], seed=1)
    want = rms_norm(x.astype(np.float64), weight.astype(np.float64), 1e-6)
    error = np.abs(cn.to_array(native.rms_norm(there, tensor(native, weight), 1e-6)) - want)
    assert (error / np.abs(want).max(-1, keepdims=True)).max() < 8 * SINGLE


def test_a_row_does_not_depend_on_its_mates(native) -> None:
    x = normal(40, 577)
    weight = tensor(native, normal(577, seed=1))
    together = cn.to_array(native.rms_norm(tensor(native, x), weight, 1e-5))
    alone = np.concatenate(
        [cn.to_array(native.rms_norm(tensor(native, x[i : i + 1]), weight, 1e-5)) for i in range(40)]
    )
    np.testing.assert_array_equal(together, alone)


def test_the_variance_does_not_cancel_where_the_mean_is_large(native) -> None:
    x = normal(3, 37) + np.float32(3000.0)
    ones = tensor(native, np.ones(37))
    got = cn.to_array(native.layer_norm(tensor(native, x), ones, None, 0.0))
    np.testing.assert_allclose(got, layer_norm(x.astype(np.float64), np.ones(37), None, 0.0), atol=1e-3)


# --- moving rows ---


def test_rows_are_replaced_in_place_and_the_last_of_equal_indices_stays(native) -> None:
    x = tensor(native, np.zeros((4, 3)))
    memory = x.bits()
    result = native.scatter_rows(x, integers(native, [2, 0, 2]), tensor(native, [[1] * 3, [2] * 3, [3] * 3]))
    np.testing.assert_array_equal(cn.to_array(result), [[2] * 3, [0] * 3, [3] * 3, [0] * 3])
    np.testing.assert_array_equal(memory, cn.to_array(result))


def test_single_integers_are_rows_too(native) -> None:
    tokens = integers(native, [5, 6, 7, 8])
    np.testing.assert_array_equal(cn.to_array(native.gather_rows(tokens, integers(native, [3, 1]))), [8, 6])
    changed = native.scatter_rows(tokens, integers(native, [1]), integers(native, [-1]))
    np.testing.assert_array_equal(cn.to_array(changed), [5, -1, 7, 8])


@pytest.mark.parametrize(
    ("source", "dtype", "want"),
    [
        (np.array([3, -2], np.int32), "float32", np.array([3.0, -2.0], np.float32)),
        (np.array([True, False]), "float32", np.array([1.0, 0.0], np.float32)),
        (np.array([2.9, -2.9], np.float32), "int32", np.array([2, -2], np.int32)),
    ],
)
def test_casts_beyond_floats(native, source: np.ndarray, dtype: str, want: np.ndarray) -> None:
    got = cn.to_array(native.cast(cn.to_tensor(native, source), dtype))
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_a_cast_to_its_own_type_shares_memory(native) -> None:
    x = tensor(native, [1.0])
    native.cast(x, "float32").bits()[0] = 5
    assert x.bits()[0] == 5


# --- refusals ---


def test_what_does_not_fit_is_refused_with_what_was_expected(native) -> None:
    x, short = tensor(native, np.zeros((2, 4))), tensor(native, np.zeros(3))
    half, ids = tensor(native, np.zeros((2, 4)), "bfloat16"), integers(native, [0, 1])
    heads = tensor(native, np.zeros((2, 1, 4)))
    table, far = tensor(native, np.zeros((9, 2))), integers(native, [0, 9])
    for error, call, message in (
        (ValueError, lambda: native.rms_norm(x, short, 0.0), r"rms_norm: weight must be \[4\], got float32 \[3\]"),
        (ValueError, lambda: native.rms_norm(x, half, 0.0), r"rms_norm: weight must be float32, got bfloat16 \[2, 4\]"),
        (ValueError, lambda: native.add_rms_norm(x, half, short, 0.0), "add_rms_norm: weight must be"),
        (ValueError, lambda: native.layer_norm(x, short, None, 0.0), "layer_norm: weight must be"),
        (ValueError, lambda: native.add(x, half), r"add: b must be float32, got bfloat16 \[2, 4\]"),
        (ValueError, lambda: native.mul(x, short), r"mul: b must be of the last axes of float32 \[2, 4\], got"),
        (ValueError, lambda: native.silu(ids), "silu takes float32, bfloat16 or float16, got int32"),
        (ValueError, lambda: native.silu_mul(x, 3), r"silu_mul: gate_up must be \[..., 6\], got float32 \[2, 4\]"),
        (ValueError, lambda: native.cast(ids, "bfloat16"), "cast takes float32, bfloat16 or float16, got int32"),
        (ValueError, lambda: native.concat([]), "concat: there must be at least one tensor to join"),
        (ValueError, lambda: native.concat([x, half]), "concat: each tensor must be float32, got bfloat16"),
        (ValueError, lambda: native.concat([x, short]), r"concat: each tensor must be \[2, 3\], got float32 \[3\]"),
        (ValueError, lambda: native.rope(x, ids, table, table, False), "rope: x must be of 3 axes"),
        (ValueError, lambda: native.rope(heads, ids, short, short, False), "rope: cos must be of 2 axes"),
        (ValueError, lambda: native.rope(heads, ids, x, x, False), "rope: cos must be at most 2 wide, half a head"),
        (IndexError, lambda: native.rope(heads, far, table, table, False), "rope: positions must lie in 0 to 8, got 9"),
        (IndexError, lambda: native.gather_rows(x, far), "gather_rows: index must lie in 0 to 1, got 9"),
        (IndexError, lambda: native.gather_rows(x, integers(native, [-1])), "index must lie in 0 to 1, got -1"),
        (ValueError, lambda: native.gather_rows(x, short), "gather_rows: index must be int32"),
        (IndexError, lambda: native.scatter_rows(x, far, x), "scatter_rows: index must lie in 0 to 1, got 9"),
        (ValueError, lambda: native.scatter_rows(x, ids, half), "scatter_rows: values must be float32"),
        (ValueError, lambda: native.scatter_rows(x, ids, short), r"scatter_rows: values must be \[2, 4\]"),
        (ValueError, lambda: NativeOps(native).split(x, (1, 2)), r"sizes must add up to 4.*got \[1, 2\]"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
