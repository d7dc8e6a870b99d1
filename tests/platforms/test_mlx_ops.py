"""MLX's operations against the float64 reference of each spec, and the noise against the reference's bits."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from cardan.errors import UnsupportedError  # noqa: E402
from cardan.ops import OP_SPECS, run_case  # noqa: E402
from cardan.ops.philox import gumbel  # noqa: E402
from cardan.platform import LinearSpec  # noqa: E402
from cardan.types import TensorView  # noqa: E402
from cardan_mlx.arrays import mlx_dtype  # noqa: E402
from cardan_mlx.linear import DenseLinear  # noqa: E402
from cardan_mlx.noise import gumbel as mlx_gumbel  # noqa: E402
from cardan_mlx.ops import MlxOps, to_numpy  # noqa: E402


def view_of(values, fmt="F32", name="w"):
    carriers = {"F32": np.float32, "F16": np.float16}
    data = np.ascontiguousarray(values, dtype=carriers[fmt])
    return TensorView(name, fmt, values.shape, data.reshape(-1).view(np.uint8).data)


def pack(values, bias, dtype):
    out_features, in_features = values.shape
    spec = LinearSpec(name="w", out_features=out_features, in_features=in_features, dtype=dtype)
    on_device = None if bias is None else mx.array(bias.astype(np.float32))
    return DenseLinear().pack([view_of(values.astype(np.float32))], spec, on_device)


TRIED = [(name, dtype) for name, spec in OP_SPECS.items() for dtype in spec.dtypes if dtype != "float64"]


@pytest.mark.parametrize(("name", "dtype"), TRIED)
def test_operations_agree_with_their_specs(name, dtype):
    spec, ops, count = OP_SPECS[name], MlxOps(has_float64=True), 0
    for arguments in spec.cases(np.random.default_rng(3)):
        assert run_case(ops, spec, arguments, dtype, pack).excess <= 1, arguments
        count += 1
    assert count


def test_noise_has_the_reference_s_bits_where_float64_is_there():
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 4, dtype=np.uint64)
    positions = np.array([0, 1, 77, 2**31 - 1], np.int32)
    ids = rng.integers(0, 300_000, (4, 50)).astype(np.int32)
    np.testing.assert_array_equal(to_numpy(mlx_gumbel(seeds, positions, 4099, True)), gumbel(seeds, positions, 4099))
    np.testing.assert_array_equal(
        to_numpy(mlx_gumbel(seeds, positions, mx.array(ids), True)), gumbel(seeds, positions, ids)
    )


def test_noise_without_float64_stays_within_a_few_ulp():
    seeds, positions = np.arange(20, dtype=np.uint64), np.arange(20, dtype=np.int32)
    got = to_numpy(mlx_gumbel(seeds, positions, 50_000, False)).astype(np.float64)
    want = gumbel(seeds, positions, 50_000).astype(np.float64)
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() < 1e-5
    assert np.abs((got - want) / np.maximum(np.abs(want), 1.0)).max() < 8 * 2.0**-24


@pytest.mark.parametrize("k", [1, 2, 7, 64, 100])
def test_topk_orders_ties_by_lower_index(k):
    rng = np.random.default_rng(k)
    x = np.round(rng.normal(size=(5, 100)) * 2).astype(np.float32) / 2
    x[0] = 1.5
    x[1, ::3] = -np.inf
    x[2, 5], x[2, 6], x[2, 7:] = -0.0, 0.0, -1.0
    values, ids = MlxOps(True).topk(mx.array(x), k)
    order = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(to_numpy(ids), order)
    np.testing.assert_array_equal(to_numpy(values), np.take_along_axis(x, order, -1))
    assert to_numpy(ids).dtype == np.int32


def test_a_type_that_mlx_lacks_is_refused():
    with pytest.raises(UnsupportedError, match=r"dtype must be one of float32, .* on MLX, got 'fp8_e4m3'. Pass one"):
        mlx_dtype("fp8_e4m3")


def test_dense_weights_must_be_dense_and_whole():
    spec = LinearSpec(name="up", out_features=4, in_features=8, dtype="float32")
    with pytest.raises(UnsupportedError, match=r"w cannot be packed for up: Q4_0 is no dense format.*Widen it first"):
        DenseLinear().pack([TensorView("w", "Q4_0", (4, 8), memoryview(b""))], spec, None)
    with pytest.raises(UnsupportedError, match=r"up needs 4 rows, but its tensors have 3\. Check the model's config"):
        DenseLinear().pack([view_of(np.ones((3, 8)))], spec, None)
