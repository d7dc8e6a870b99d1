"""Every block format against the gguf package, every dense format against numpy and torch."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from cardan.errors import CheckpointError
from cardan.quantization import BLOCK_FORMATS, FORMATS, dequantize, row_bytes, tensor_bytes
from cardan.types import TensorView

HALF_AT = {  # byte offsets of the float16 numbers in a block
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}
SCALES = {
    "usual": lambda rng, n: rng.normal(0, 0.01, n).astype(np.float16),
    "subnormal": lambda rng, n: rng.integers(1, 1024, n).astype(np.uint16).view(np.float16),
    "negative": lambda rng, n: -np.abs(rng.normal(0, 0.3, n)).astype(np.float16),
    "huge": lambda rng, n: rng.choice(np.array([65504, -65504, 6e-8, 0, -0.0], dtype=np.float16), n),
}


def random_blocks(fmt: str, count: int, scales: str, seed: int = 7) -> np.ndarray:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, FORMATS[fmt].block_bytes), dtype=np.uint8)
    for at in HALF_AT[fmt]:
        blocks[:, at : at + 2] = SCALES[scales](rng, count).view(np.uint8).reshape(count, 2)
    if fmt == "MXFP4":
        blocks[:, 0] %= 250  # above, values overflow, and 255 is NaN, which ggml reads as a number
    return blocks


def view_of(fmt: str, shape: tuple[int, ...], raw: np.ndarray | bytes) -> TensorView:
    return TensorView("t", fmt, shape, memoryview(raw).cast("B"))


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_block_values_are_those_of_the_gguf_package_bit_for_bit(fmt: str, scales: str) -> None:
    blocks = random_blocks(fmt, 96, scales)
    elements = FORMATS[fmt].block_elements
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[fmt]).reshape(32, 3 * elements)
    got = dequantize(view_of(fmt, (32, 3 * elements), blocks))
    assert got.dtype == np.float32
    assert got.tobytes() == np.ascontiguousarray(expected, dtype=np.float32).tobytes()


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_tensors_larger_than_a_piece_are_whole(fmt: str) -> None:
    elements = FORMATS[fmt].block_elements
    count = (1 << 18) // elements + 3
    blocks = random_blocks(fmt, count, "usual")
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[fmt])
    np.testing.assert_array_equal(dequantize(view_of(fmt, (count, elements), blocks)), expected)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_block_sizes_are_those_of_the_gguf_package(fmt: str) -> None:
    elements, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[fmt]]
    assert (FORMATS[fmt].block_elements, FORMATS[fmt].block_bytes) == (elements, num_bytes)
    assert row_bytes(fmt, 3 * elements) == 3 * num_bytes
    assert FORMATS[fmt].quantized
    assert FORMATS[fmt].bits < FORMATS[fmt].bits_per_weight == 8 * num_bytes / elements


@pytest.mark.parametrize("fmt", [fmt for fmt in BLOCK_FORMATS if HALF_AT[fmt] == (0,) or len(HALF_AT[fmt]) == 1])
def test_a_symmetric_format_has_no_offset(fmt: str) -> None:
    assert FORMATS[fmt].symmetric


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        ("BF16", torch.bfloat16),
        ("F16", torch.float16),
        ("F8_E4M3", torch.float8_e4m3fn),
        ("F8_E5M2", torch.float8_e5m2),
    ],
)
def test_every_bit_pattern_of_a_narrow_float_is_that_of_torch(fmt: str, dtype: torch.dtype) -> None:
    size = FORMATS[fmt].block_bytes
    raw = np.arange(2 ** (8 * size), dtype=np.uint16).astype(np.uint16 if size == 2 else np.uint8)
    expected = torch.from_numpy(raw.view(np.int16 if size == 2 else np.int8)).view(dtype).float().numpy()
    got = dequantize(view_of(fmt, raw.shape, raw))
    np.testing.assert_array_equal(got, expected)
    finite = np.isfinite(expected)
    assert (np.signbit(got) == np.signbit(expected))[finite].all()


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        ("F32", "<f4"),
        ("F64", "<f8"),
        ("I8", "<i1"),
        ("I16", "<i2"),
        ("I32", "<i4"),
        ("I64", "<i8"),
        ("U8", "<u1"),
        ("U16", "<u2"),
        ("U32", "<u4"),
        ("U64", "<u8"),
        ("BOOL", "?"),
    ],
)
def test_plain_numbers_are_converted(fmt: str, dtype: str) -> None:
    values = np.array([0, 1, 1, 0] if fmt == "BOOL" else [0, 1, 100, 3]).astype(dtype)
    got = dequantize(view_of(fmt, (2, 2), values.tobytes()))
    np.testing.assert_array_equal(got, values.astype(np.float32).reshape(2, 2))


def test_values_are_read_from_an_odd_address() -> None:
    blocks = random_blocks("Q4_1", 4, "usual")
    shifted = memoryview(b"x" + blocks.tobytes())[1:]
    got = dequantize(TensorView("t", "Q4_1", (4, 32), shifted))
    np.testing.assert_array_equal(got, dequantize(view_of("Q4_1", (4, 32), blocks)))


def test_a_scalar_and_an_empty_tensor_have_values() -> None:
    assert dequantize(view_of("F32", (), np.float32(2.5).tobytes())).item() == 2.5
    assert dequantize(view_of("Q8_0", (0, 32), b"")).shape == (0, 32)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"No weight format is called 'Q9'; known are F64, .*Q6_K"):
        dequantize(view_of("Q9", (1,), b"0"))


def test_bytes_that_do_not_fill_the_shape_are_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"'t' has 19 bytes, but Q4_1 of shape \(1, 32\) takes 20.*fetch it again"
    ):
        dequantize(view_of("Q4_1", (1, 32), b"0" * 19))


def test_a_row_of_broken_blocks_is_refused() -> None:
    with pytest.raises(CheckpointError, match="Q4_K stores rows in blocks of 256 elements, got rows of 300"):
        tensor_bytes("Q4_K", (2, 300))


def test_tensor_bytes_of_a_stack() -> None:
    assert tensor_bytes("Q4_0", (2, 3, 64)) == 2 * 3 * 2 * 18
    assert tensor_bytes("BF16", ()) == 2
