"""The writer: rounding errors within half a step, as good as the gguf package's."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cardan.errors import CheckpointError
from cardan.quantization import dequantize, quantize, tensor_bytes
from cardan.types import TensorView

BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q8_0")
HALF_EPS = 2.0**-11  # rounding a scale to float16 moves it by this share of itself


def round_trip(values: np.ndarray, fmt: str) -> np.ndarray:
    data = quantize(values, fmt)
    assert len(data) == tensor_bytes(fmt, values.shape)
    return dequantize(TensorView("t", fmt, values.shape, memoryview(data)))


def error_bound(rows: np.ndarray, fmt: str) -> np.ndarray:
    """Largest error that rounding may give, float64 ``[rows, 1]``.

    Half a step, a whole one at the end that the asymmetric codes cut off, and what float16 scales add.
    """
    rows = rows.astype(np.float64)
    extreme = np.abs(rows).max(axis=1, keepdims=True)
    spread = rows.max(axis=1, keepdims=True) - rows.min(axis=1, keepdims=True)
    step = {"Q4_0": extreme / 8, "Q4_1": spread / 15, "Q5_0": extreme / 16, "Q8_0": extreme / 127}[fmt]
    whole = 1.0 if fmt in ("Q4_0", "Q5_0") else 0.5
    return step * whole * 1.001 + (extreme + spread) * HALF_EPS + 32 * 2.0**-25


@pytest.mark.parametrize("fmt", BLOCKS)
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([1e-7, 1e-3, 1.0, 300.0]), shift=st.sampled_from([0.0, 3.0]))
@settings(max_examples=40, deadline=None)
def test_errors_stay_within_the_step(fmt: str, seed: int, scale: float, shift: float) -> None:
    rows = ((np.random.default_rng(seed).standard_normal((8, 32)) + shift) * scale).astype(np.float32)
    error = np.abs(round_trip(rows, fmt).astype(np.float64) - rows)
    assert (error <= error_bound(rows, fmt)).all()


@pytest.mark.parametrize("fmt", BLOCKS)
def test_the_error_is_no_worse_than_that_of_the_gguf_package(fmt: str) -> None:
    rows = np.random.default_rng(3).standard_normal((256, 576)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[fmt]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
    ours = round_trip(rows, fmt)
    assert np.square(ours - rows).mean() <= 1.001 * np.square(theirs - rows).mean()
    assert (ours == theirs).mean() > 0.999


@pytest.mark.parametrize("fmt", BLOCKS)
def test_values_that_the_format_holds_come_back_exactly(fmt: str) -> None:
    codes = {
        "Q4_0": np.arange(-8, 8),
        "Q4_1": np.arange(16),
        "Q5_0": np.arange(-16, 16),
        "Q8_0": np.arange(-127, 128, 8),
    }
    row = np.resize(codes[fmt], 32)
    row[-1] = {"Q4_0": -8, "Q4_1": 15, "Q5_0": -16, "Q8_0": 127}[fmt]
    values = np.stack((row, -row, np.zeros(32))).astype(np.float32) * np.float32(0.25)
    np.testing.assert_array_equal(round_trip(values, fmt), values)


@pytest.mark.parametrize("fmt", BLOCKS)
def test_tensors_larger_than_a_piece_are_whole(fmt: str) -> None:
    rows = np.random.default_rng(5).standard_normal((513, 1024)).astype(np.float32)
    assert quantize(rows, fmt) == b"".join(quantize(part, fmt) for part in np.array_split(rows, 7))


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.random.default_rng(1).integers(0, 2**32, 5000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 3e38)]
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().tobytes()
    assert quantize(values, "BF16") == expected


def test_dense_formats_are_written() -> None:
    values = np.array([[1.5, -2.25]], dtype=np.float32)
    assert quantize(values, "F32") == values.tobytes()
    assert quantize(values, "F16") == values.astype("<f2").tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    values = np.zeros(32, dtype=np.float32)
    values[5] = bad
    with pytest.raises(CheckpointError, match="Cannot write values as Q4_0: they hold NaN or infinity"):
        quantize(values, "Q4_0")


@pytest.mark.parametrize("fmt", ["F16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_values_beyond_a_float16_scale_are_refused(fmt: str) -> None:
    values = np.linspace(-1e9, 1e9, 32, dtype=np.float32)
    with pytest.raises(CheckpointError, match=f"Cannot write values as {fmt}: they need a float16 above 65504"):
        quantize(values, fmt)


def test_values_beyond_bfloat16_are_refused() -> None:
    with pytest.raises(CheckpointError, match="Cannot write values as BF16: they are too large"):
        quantize(np.full(4, 3.4e38, dtype=np.float32), "BF16")


def test_formats_without_a_writer_are_refused() -> None:
    with pytest.raises(CheckpointError, match="cannot write 'Q4_K'; it writes F32, F16, BF16, Q4_0"):
        quantize(np.zeros(256), "Q4_K")


def test_rows_of_broken_blocks_are_refused() -> None:
    with pytest.raises(CheckpointError, match="Q8_0 stores rows in blocks of 32 elements, got rows of 48"):
        quantize(np.zeros((2, 48)), "Q8_0")
