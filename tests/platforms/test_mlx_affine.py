"""Quantized weights on MLX: block formats against the gguf package, MLX's own groups, weights quantized at load."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from cardan.errors import UnsupportedError  # noqa: E402
from cardan.platform import LinearSpec  # noqa: E402
from cardan.quantization import AFFINE_FORMATS as KNOWN_AFFINE_FORMATS  # noqa: E402
from cardan.quantization import FORMATS, dequantize  # noqa: E402
from cardan.types import TensorView  # noqa: E402
from cardan_mlx import affine  # noqa: E402
from cardan_mlx.affine import AffineLinear, parse_affine  # noqa: E402
from cardan_mlx.linear import DenseLinear  # noqa: E402
from cardan_mlx.mlx_platform import AFFINE_FORMATS, EXACT_FORMATS, REQUANTIZED_FORMATS  # noqa: E402
from cardan_mlx.ops import to_numpy  # noqa: E402
from cardan_mlx.repacking import CONVERTERS, REQUANTIZED, pack_codes  # noqa: E402

gguf = pytest.importorskip("gguf")

COLUMNS = 512
FP16_SCALES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def spec(rows, columns=COLUMNS, dtype="float32", quantize=None):
    return LinearSpec(name="up", out_features=rows, in_features=columns, dtype=dtype, quantize=quantize)


def blocks_of(fmt, rows, seed=0):
    """Random bytes of a block format whose half-precision numbers are of ordinary size, and their exact values."""
    described = FORMATS[fmt]
    count = rows * COLUMNS // described.block_elements
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (count, described.block_bytes), dtype=np.uint8)
    at = {"Q6_K": (208,)}.get(fmt, (0, 2) if not described.symmetric else (0,))
    for offset in at:
        halves = (rng.normal(size=count) * 0.02).astype("<f2")
        data[:, offset : offset + 2] = halves.view(np.uint8).reshape(-1, 2)
    kind = getattr(gguf.GGMLQuantizationType, fmt)
    values = gguf.dequantize(data.reshape(-1), kind).reshape(rows, COLUMNS)
    return TensorView("w", fmt, (rows, COLUMNS), data.reshape(-1).data), values


@pytest.mark.parametrize("fmt", EXACT_FORMATS)
def test_block_formats_are_mapped_exactly(fmt):
    view, values = blocks_of(fmt, 6)
    packed = AffineLinear().pack([view], spec(6), None)
    np.testing.assert_array_equal(to_numpy(packed.dequantized()), values)
    np.testing.assert_array_equal(to_numpy(packed.gather(mx.array([3, 0, 3]))), values[[3, 0, 3]])


@pytest.mark.parametrize("fmt", FP16_SCALES)
def test_half_precision_activations_keep_half_precision_scales(fmt):
    view, values = blocks_of(fmt, 4)
    packed = AffineLinear().pack([view], spec(4, dtype="float16"), None)
    assert packed.arrays.scales.dtype == mx.float16
    wide = AffineLinear().pack([view], spec(4), None)
    assert packed.num_bytes < wide.num_bytes
    for narrow, exact in ((packed.arrays.scales, wide.arrays.scales), (packed.arrays.biases, wide.arrays.biases)):
        np.testing.assert_array_equal(to_numpy(narrow).astype(np.float32), to_numpy(exact))
    x = np.random.default_rng(1).normal(size=(3, COLUMNS)).astype(np.float16)
    got = to_numpy(packed.apply(mx.array(x))).astype(np.float64)
    want = x.astype(np.float64) @ values.T.astype(np.float64)
    assert np.abs(got - want).max() < 2e-2 * np.abs(want).max()


def test_scales_that_half_precision_cannot_hold_stay_wide():
    view, values = blocks_of("Q8_0", 2)
    data = np.frombuffer(view.data, np.uint8).reshape(-1, 34).copy()
    data[:, :2] = np.full(len(data), 600.0, "<f2").view(np.uint8).reshape(-1, 2)
    view = TensorView("w", "Q8_0", view.shape, data.reshape(-1).data)
    values = gguf.dequantize(data.reshape(-1), gguf.GGMLQuantizationType.Q8_0).reshape(2, COLUMNS)
    packed = AffineLinear().pack([view], spec(2, dtype="float16"), None)
    assert packed.arrays.scales.dtype == mx.float32
    np.testing.assert_array_equal(to_numpy(packed.dequantized()), values)


def test_q6_k_is_requantized_within_its_stated_bound():
    view, values = blocks_of("Q6_K", 6)
    got = to_numpy(AffineLinear().pack([view], spec(6), None).dequantized())
    groups = values.reshape(-1, 32)
    bound = np.repeat((groups.max(1) - groups.min(1)) / 255 * 0.501, 32).reshape(values.shape)
    assert (np.abs(got - values) <= bound + 1e-6).all()
    assert np.abs(got - values).max() > 0
    assert REQUANTIZED_FORMATS == REQUANTIZED
    assert set(CONVERTERS) == set(EXACT_FORMATS) | set(REQUANTIZED)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_those_of_the_exact_weights(dtype):
    first, top = blocks_of("Q5_0", 5, 1)
    second, bottom = blocks_of("Q5_0", 3, 2)
    bias = np.random.default_rng(0).normal(size=8).astype(np.float32)
    packed = AffineLinear().pack([first, second], spec(8, dtype=dtype), mx.array(bias))
    x = mx.array(np.random.default_rng(3).normal(size=(4, COLUMNS)).astype(np.float32)).astype(getattr(mx, dtype))
    got = packed.apply(x)
    assert got.dtype == x.dtype
    want = to_numpy(x).astype(np.float64) @ np.concatenate((top, bottom)).T.astype(np.float64) + bias
    tolerance = {"float32": 2e-6, "bfloat16": 8e-3}[dtype]
    assert np.abs(to_numpy(got) - want).max() < tolerance * np.abs(want).max()


def test_large_weights_are_repacked_in_pieces(monkeypatch):
    monkeypatch.setattr(affine, "ROWS_AT_ONCE", 3 * COLUMNS)
    view, values = blocks_of("Q4_1", 10)
    np.testing.assert_array_equal(to_numpy(AffineLinear().pack([view], spec(10), None).dequantized()), values)


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_codes_are_packed_as_mlx_packs_them(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 64), dtype=np.uint8)
    ones, zeros = mx.ones((3, 2)), mx.zeros((3, 2))
    unpacked = mx.dequantize(mx.array(pack_codes(codes, bits)), ones, zeros, group_size=32, bits=bits)
    np.testing.assert_array_equal(to_numpy(unpacked), codes)


def test_every_affine_format_of_checkpoints_is_claimed():
    assert AFFINE_FORMATS == KNOWN_AFFINE_FORMATS


@pytest.mark.parametrize("fmt", AFFINE_FORMATS)
def test_affine_groups_of_a_checkpoint_are_taken_over(fmt):
    kind = parse_affine(fmt)
    assert kind is not None
    values = mx.array(np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32))
    scale_type = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32}[kind.scale]
    words, scales, biases = mx.quantize(values.astype(scale_type), group_size=kind.group, bits=kind.bits)
    groups = 256 // kind.group

    def raw(array):
        carrier = mx.uint32 if array.dtype in (mx.float32, mx.uint32) else mx.uint16
        return np.array(array.view(carrier)).view(np.uint8).reshape(4, groups, -1)

    data = np.concatenate([raw(part) for part in (scales, biases, words)], axis=2)
    view = TensorView("w", fmt, (4, 256), np.ascontiguousarray(data).reshape(-1).data)
    packed = AffineLinear().pack([view], spec(4, 256), None)
    for mine, theirs in ((packed.arrays.words, words), (packed.arrays.scales, scales), (packed.arrays.biases, biases)):
        np.testing.assert_array_equal(to_numpy(mine), to_numpy(theirs))
    own_type = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}[kind.scale]
    assert packed.arrays.scales.dtype == mx.float32
    assert AffineLinear().pack([view], spec(4, 256, own_type), None).arrays.scales.dtype == scale_type
    want = dequantize(view)[1:2]
    np.testing.assert_allclose(to_numpy(packed.gather(mx.array([1]))), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("quantize", "bits"), [("mlx_q4", 4), ("mlx_q8", 8)])
@pytest.mark.parametrize(("columns", "group"), [(128, 64), (96, 32)])
def test_dense_weights_are_quantized_at_load(quantize, bits, columns, group):
    values = np.random.default_rng(0).normal(size=(6, columns)).astype(np.float32)
    view = TensorView("w", "F32", values.shape, values.reshape(-1).view(np.uint8).data)
    packed = AffineLinear().pack([view], spec(6, columns, quantize=quantize), None)
    assert (packed.arrays.bits, packed.arrays.group) == (bits, group)
    ranges = np.ptp(values.reshape(6, -1, group), axis=-1)
    error = np.abs(to_numpy(packed.dequantized()) - values).reshape(6, -1, group).max(-1)
    assert (error <= ranges / (2**bits - 1)).all()
    assert error.max() > 0


def test_what_is_not_taken_says_why():
    linear = AffineLinear()
    assert linear.claims("Q4_1", spec(4)) is None
    assert "F32 is none of Q4_0" in linear.claims("F32", spec(4))
    assert "Q2_K is none of" in linear.claims("Q2_K", spec(4))
    assert "rows of 96 are no multiple of its groups of 64" in linear.claims("AFFINE4_64_F16", spec(4, 96))
    made = spec(4, quantize="mlx_q4")
    assert linear.claims("BF16", made) is None
    assert "Q8_0 is dequantized first, since mlx_q4 was asked for" in linear.claims("Q8_0", made)
    assert "rows of 33 are no multiple of 32, so up stays dense" in linear.claims("F32", spec(4, 33, quantize="mlx_q4"))
    assert "awq is none of mlx_q4, mlx_q8" in linear.claims("F32", spec(4, quantize="awq"))
    for odd in ("AFFINE7_64_F16", "AFFINE4_48_F16", "AFFINE4_64_Q8", "AFFINE4", "AFFINEx_64_F16"):
        assert parse_affine(odd) is None
    with pytest.raises(UnsupportedError, match=r"w cannot be packed for up: F32 is none of .* Widen it first"):
        linear.pack([TensorView("w", "F32", (4, COLUMNS), memoryview(b""))], spec(4), None)
    assert DenseLinear().claims("Q4_1", spec(4)) is not None
