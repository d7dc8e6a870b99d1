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
from cardan_mlx.mlx_platform import AFFINE_FORMATS  # noqa: E402
from cardan_mlx.ops import to_numpy  # noqa: E402
from cardan_mlx.repacking import CONVERTERS, EXACT, REQUANTIZED, pack_codes  # noqa: E402

gguf = pytest.importorskip("gguf")

COLUMNS = 512
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Largest relative error of rounding to a type."""
CPU_BUILD = AffineLinear(sums_in_float32=False)
ON_METAL = AffineLinear(sums_in_float32=True)
FP16_SCALES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def spec(rows, columns=COLUMNS, dtype="float32", quantize=None):
    return LinearSpec(name="up", out_features=rows, in_features=columns, dtype=dtype, quantize=quantize)


def weight_errors(arrays, rounding):
    """How far each weight may be off: code times scale is rounded once, and its sum with the bias once."""
    scales, biases = (
        np.repeat(to_numpy(array).astype(np.float64), arrays.group, axis=1) for array in (arrays.scales, arrays.biases)
    )
    largest = 2**arrays.bits - 1
    return rounding * (np.abs(scales) * largest + np.maximum(np.abs(biases), np.abs(scales * largest + biases)))


def product_errors(x, values, arrays, result):
    """How far each product with ``x`` may be off where terms are added up in float32 and the result is rounded once.

    Every term is rounded once and takes part in at most as many additions as there are columns, and one for the bias.
    Source: Higham, Accuracy and Stability of Numerical Algorithms, section 3.1.
    """
    count = values.shape[1] + 2
    gamma = count * ROUNDING["float32"] / (1 - count * ROUNDING["float32"])
    sizes = np.abs(x) @ np.abs(values).T
    return np.abs(x) @ weight_errors(arrays, ROUNDING["float32"]).T + (gamma + ROUNDING[result]) * sizes


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


@pytest.mark.parametrize("fmt", EXACT)
def test_block_formats_are_mapped_exactly(fmt):
    view, values = blocks_of(fmt, 6)
    packed = CPU_BUILD.pack([view], spec(6), None)
    np.testing.assert_array_equal(to_numpy(packed.dequantized()), values)
    np.testing.assert_array_equal(to_numpy(packed.gather(mx.array([3, 0, 3]))), values[[3, 0, 3]])


@pytest.mark.parametrize("fmt", FP16_SCALES)
def test_half_precision_activations_keep_half_precision_scales_on_metal(fmt):
    view, values = blocks_of(fmt, 4)
    packed = ON_METAL.pack([view], spec(4, dtype="float16"), None)
    assert packed.arrays.scales.dtype == mx.float16
    wide = CPU_BUILD.pack([view], spec(4, dtype="float16"), None)
    assert wide.arrays.scales.dtype == mx.float32
    assert packed.num_bytes < wide.num_bytes
    for narrow, exact in ((packed.arrays.scales, wide.arrays.scales), (packed.arrays.biases, wide.arrays.biases)):
        np.testing.assert_array_equal(to_numpy(narrow).astype(np.float32), to_numpy(exact))
    # one activation of 1 a row, so that nothing is added up: this build would add up in float16
    places = np.array([0, 31, 32, 511])
    x = np.eye(COLUMNS, dtype=np.float16)[places]
    got = to_numpy(packed.apply(mx.array(x))).astype(np.float64)
    allowed = weight_errors(packed.arrays, ROUNDING["float16"])[:, places].T
    assert (np.abs(got - values[:, places].T) <= allowed).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fmt", ["Q8_0", "AFFINE8_64_F16", "AFFINE8_64_BF16"])
def test_the_cpu_build_adds_up_in_float32(fmt, dtype):
    """Every weight is 1: 4,096 and 511 ones are 4,607, of which a sum in halves would keep 4,096."""
    if fmt == "Q8_0":
        blocks = np.ones((COLUMNS // 32, 34), np.uint8)
        blocks[:, :2] = np.array([1.0], "<f2").view(np.uint8)
    else:
        one = {"F16": 0x3C00, "BF16": 0x3F80}[fmt.rpartition("_")[2]]
        blocks = np.ones((COLUMNS // 64, 68), np.uint8)
        blocks[:, :4] = np.array([one, 0], "<u2").view(np.uint8)
    view = TensorView("w", fmt, (1, COLUMNS), blocks.reshape(-1).data)
    x = np.ones((1, COLUMNS), np.float32)
    x[0, 0] = 4096
    packed = CPU_BUILD.pack([view], spec(1, dtype=dtype), None)
    assert packed.num_bytes > 0
    got = packed.apply(mx.array(x).astype(getattr(mx, dtype)))
    assert got.dtype == getattr(mx, dtype)
    assert abs(float(got.item()) - 4607) <= ROUNDING[dtype] * 4608


def test_scales_that_half_precision_cannot_hold_stay_wide():
    view, values = blocks_of("Q8_0", 2)
    data = np.frombuffer(view.data, np.uint8).reshape(-1, 34).copy()
    data[:, :2] = np.full(len(data), 600.0, "<f2").view(np.uint8).reshape(-1, 2)
    view = TensorView("w", "Q8_0", view.shape, data.reshape(-1).data)
    values = gguf.dequantize(data.reshape(-1), gguf.GGMLQuantizationType.Q8_0).reshape(2, COLUMNS)
    packed = ON_METAL.pack([view], spec(2, dtype="float16"), None)
    assert packed.arrays.scales.dtype == mx.float32
    np.testing.assert_array_equal(to_numpy(packed.dequantized()), values)


def test_q6_k_is_requantized_within_its_stated_bound():
    view, values = blocks_of("Q6_K", 6)
    packed = CPU_BUILD.pack([view], spec(6), None)
    got = to_numpy(packed.dequantized())
    groups = values.reshape(-1, 32)
    # half a step; which step it is comes from a quotient of up to 255, rounded three times in float32
    steps = np.ptp(groups, axis=1) / 255 * (0.5 + 3 * 255 * ROUNDING["float32"])
    bound = np.repeat(steps, 32).reshape(values.shape) + weight_errors(packed.arrays, ROUNDING["float32"])
    assert (np.abs(got - values) <= bound).all()
    assert np.abs(got - values).max() > 0


def test_block_formats_are_exact_but_for_one():
    assert EXACT == ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K")
    assert set(REQUANTIZED) == {"Q6_K"}
    assert set(CONVERTERS) == set(EXACT) | set(REQUANTIZED)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_those_of_the_exact_weights(dtype):
    first, top = blocks_of("Q5_0", 5, 1)
    second, bottom = blocks_of("Q5_0", 3, 2)
    bias = np.random.default_rng(0).normal(size=8).astype(np.float32)
    packed = CPU_BUILD.pack([first, second], spec(8, dtype=dtype), mx.array(bias))
    x = mx.array(np.random.default_rng(3).normal(size=(4, COLUMNS)).astype(np.float32)).astype(getattr(mx, dtype))
    got = packed.apply(x)
    assert got.dtype == x.dtype
    given, values = to_numpy(x).astype(np.float64), np.concatenate((top, bottom)).astype(np.float64)
    allowed = product_errors(given, values, packed.arrays, dtype) + ROUNDING[dtype] * np.abs(bias)
    assert (np.abs(to_numpy(got) - (given @ values.T + bias)) <= allowed).all()


def test_large_weights_are_repacked_in_pieces(monkeypatch):
    monkeypatch.setattr(affine, "ELEMENTS_AT_ONCE", 3 * COLUMNS)
    view, values = blocks_of("Q4_1", 10)
    np.testing.assert_array_equal(to_numpy(CPU_BUILD.pack([view], spec(10), None).dequantized()), values)


def test_pieces_whose_scales_differ_in_type_are_joined_exactly(monkeypatch):
    """The scale 600 makes a bias of -76,800, which half precision lacks: that piece's scales are float32."""
    monkeypatch.setattr(affine, "ELEMENTS_AT_ONCE", COLUMNS)
    view, _ = blocks_of("Q8_0", 6)
    data = np.frombuffer(view.data, np.uint8).reshape(6, -1, 34).copy()
    for wide in (0, 4):
        changed = data.copy()
        changed[wide, :, :2] = np.array([600.0], "<f2").view(np.uint8)
        raw = changed.reshape(-1)
        values = gguf.dequantize(raw, gguf.GGMLQuantizationType.Q8_0).reshape(6, COLUMNS)
        packed = ON_METAL.pack([TensorView("w", "Q8_0", (6, COLUMNS), raw.data)], spec(6, dtype="float16"), None)
        assert packed.arrays.scales.dtype == mx.float32
        np.testing.assert_array_equal(to_numpy(packed.dequantized()), values)


@pytest.mark.parametrize(("fmt", "quantize"), [("Q4_0", None), ("AFFINE4_64_F16", None), ("F32", "mlx_q8")])
def test_repacking_takes_little_beside_the_weight_itself(fmt, quantize, monkeypatch):
    rows, pieces = 4096, 32
    monkeypatch.setattr(affine, "ELEMENTS_AT_ONCE", rows * COLUMNS // pieces)
    row_bytes = {"Q4_0": COLUMNS // 32 * 18, "AFFINE4_64_F16": COLUMNS // 64 * 36, "F32": 4 * COLUMNS}[fmt]
    halves = [TensorView("w", fmt, (rows // 2, COLUMNS), memoryview(bytes(row_bytes * rows // 2))) for _ in range(2)]
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    packed = CPU_BUILD.pack(halves, spec(rows, quantize=quantize), None)
    peak = mx.get_peak_memory() - before
    assert packed.num_bytes > 2**20
    # a piece, the next one that is being made, and what that is made from: up to its float32 values; and ten arrays
    # of theirs are rounded up to pages of 4 KiB
    piece = (2 * packed.num_bytes + 4 * rows * COLUMNS) / pieces + 10 * 4096
    assert peak <= packed.num_bytes + piece
    assert packed.num_bytes + piece < 1.5 * packed.num_bytes


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
    packed = CPU_BUILD.pack([view], spec(4, 256), None)
    for mine, theirs in ((packed.arrays.words, words), (packed.arrays.scales, scales), (packed.arrays.biases, biases)):
        np.testing.assert_array_equal(to_numpy(mine), to_numpy(theirs))
    own_type = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}[kind.scale]
    assert packed.arrays.scales.dtype == mx.float32
    assert ON_METAL.pack([view], spec(4, 256, own_type), None).arrays.scales.dtype == scale_type
    assert CPU_BUILD.pack([view], spec(4, 256, own_type), None).arrays.scales.dtype == mx.float32
    off = np.abs(to_numpy(packed.gather(mx.array([1]))) - dequantize(view)[1:2])
    # both are computed in float32
    assert (off <= 2 * weight_errors(packed.arrays, ROUNDING["float32"])[1:2]).all()


@pytest.mark.parametrize(("quantize", "bits"), [("mlx_q4", 4), ("mlx_q8", 8)])
@pytest.mark.parametrize(("columns", "group"), [(128, 64), (96, 32)])
def test_dense_weights_are_quantized_at_load(quantize, bits, columns, group):
    values = np.random.default_rng(0).normal(size=(6, columns)).astype(np.float32)
    view = TensorView("w", "F32", values.shape, values.reshape(-1).view(np.uint8).data)
    packed = CPU_BUILD.pack([view], spec(6, columns, quantize=quantize), None)
    assert (packed.arrays.bits, packed.arrays.group) == (bits, group)
    ranges = np.ptp(values.reshape(6, -1, group), axis=-1)
    error = np.abs(to_numpy(packed.dequantized()) - values).reshape(6, -1, group).max(-1)
    # half a step by rounding; up to a whole one at the far end, since MLX stretches steps until zero has a code
    assert (error <= ranges / (2**bits - 1) + weight_errors(packed.arrays, ROUNDING["float32"]).max()).all()
    assert error.max() > 0


def test_what_is_not_taken_says_why():
    linear = CPU_BUILD
    assert linear.claims("Q4_1", spec(4)) is None
    assert "F32 is none of Q4_0" in linear.claims("F32", spec(4))
    assert "Q2_K is none of" in linear.claims("Q2_K", spec(4))
    assert "rows of 96 are no multiple of its groups of 64" in linear.claims("AFFINE4_64_F16", spec(4, 96))
    made = spec(4, quantize="mlx_q4")
    assert linear.claims("BF16", made) is None
    assert "Q8_0 is dequantized first, since mlx_q4 was asked for" in linear.claims("Q8_0", made)
    assert "rows of 33 are no multiple of 32, so up stays dense" in linear.claims("F32", spec(4, 33, quantize="mlx_q4"))
    assert "awq is none of mlx_q4, mlx_q8" in linear.claims("F32", spec(4, quantize="awq"))
    for odd in ("AFFINE7_64_F16", "AFFINE6_64_F16", "AFFINE4_48_F16", "AFFINE4_64_Q8", "AFFINE4", "AFFINEx_64_F16"):
        assert parse_affine(odd) is None
    with pytest.raises(UnsupportedError, match=r"w cannot be packed for up: F32 is none of .* Widen it first"):
        linear.pack([TensorView("w", "F32", (4, COLUMNS), memoryview(b""))], spec(4), None)
    assert DenseLinear().claims("Q4_1", spec(4)) is not None
