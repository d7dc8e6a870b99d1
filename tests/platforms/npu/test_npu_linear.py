"""Quantized products on the simulated NPU: which call takes what, and that it comes to the weights' own values."""

from __future__ import annotations

import numpy as np
import pytest

from cardan.errors import UnsupportedError
from cardan.platform import LinearSpec
from cardan.quantization import ActivationStep, CalibratedView, dequantize, format_spec
from cardan.types import TensorView

UNIT = 2.0**-8
"""What bfloat16 rounds by."""


def by_row(
    fmt: str,
    rows: int,
    columns: int,
    scale: float = 0.01,
    step: ActivationStep | None = None,
    odd: tuple[int, float] | None = None,
) -> TensorView:
    """Codes at random with one scale for each row, as a checkpoint with channel-wise scales has them.

    ``odd`` is a row and the scale that it has instead.
    """
    spec = format_spec(fmt)
    rng = np.random.default_rng(3)
    per_row = columns // spec.block_elements
    kinds = {"float32": np.float32, "float16": np.float16}
    drawn = rng.uniform(scale, 2 * scale, rows).astype(kinds[spec.scale])
    if odd is not None:
        drawn[odd[0]] = odd[1]
    scales = np.repeat(drawn, per_row)
    codes = rng.integers(0, 256, (rows * per_row, spec.block_elements * spec.bits // 8), dtype=np.uint8)
    blocks = np.concatenate((scales[:, None].view(np.uint8).reshape(rows * per_row, -1), codes), axis=1)
    held = ("w", fmt, (rows, columns), np.ascontiguousarray(blocks).reshape(-1).data)
    return TensorView(*held) if step is None else CalibratedView(*held, activations=step)


def packed(device, view: TensorView, dtype: str = "bfloat16", bias: np.ndarray | None = None):
    rows, columns = view.shape
    spec = LinearSpec(name="w", out_features=rows, in_features=columns, dtype=dtype)
    method = device.linear_methods()[0]
    assert method.claims(view.dtype, spec) is None
    return method.pack((view,), spec, None if bias is None else device.ops.from_host(bias, "float32"))


@pytest.mark.parametrize(
    ("fmt", "kind"),
    [
        ("INT8_128_F32_A8", "RoundedByToken"),
        ("INT8_128_F32", "WidenedOnTheWay"),
        ("INT4_128_F16", "WidenedOnTheWay"),
        ("Q8_0", "WidenedOnTheWay"),
        ("Q4_0", "WidenedOnTheWay"),
    ],
)
def test_values_are_kept(device, fmt, kind):
    view = by_row(fmt, 24, 256)
    bias = np.linspace(-1, 1, 24).astype(np.float32)
    weight = packed(device, view, "bfloat16", bias)
    assert type(weight).__name__ == kind
    want = dequantize(view)
    x = np.random.default_rng(4).normal(size=(3, 256)).astype(np.float32)
    got = device.ops.to_host(weight.apply(device.ops.from_host(x, "bfloat16")))
    np.testing.assert_allclose(got, x @ want.T + bias, atol=2e-2 * np.abs(x @ want.T).max())
    rows = device.ops.to_host(weight.gather(device.ops.from_host(np.array([5, 0], np.int32))))
    np.testing.assert_allclose(rows, want[[5, 0]], rtol=1e-2)
    assert weight.apply(device.ops.from_host(np.zeros((0, 256), np.float32), "bfloat16")).shape == (0, 24)


@pytest.mark.parametrize("step", [ActivationStep(0.0271, 0), ActivationStep(0.0271, -17), ActivationStep(0.0113, 5)])
def test_a_calibrated_step_rounds_activations_as_the_checkpoint_says(device, step):
    """Held to float64: codes by the step, cut to int8 where they exceed it, times codes."""
    view = by_row("INT8_128_F32_A8", 24, 256, step=step)
    bias = np.linspace(-1, 1, 24).astype(np.float32)
    weight = packed(device, view, bias=bias)
    assert type(weight).__name__ == "RoundedAsCalibrated"
    given = device.ops.from_host(np.random.default_rng(4).normal(size=(3, 256)).astype(np.float32), "bfloat16")
    x = device.ops.to_host(given).astype(np.float64)
    codes = np.clip(np.rint(x / np.float32(step.step)) + step.zero, -128, 127) - step.zero
    want = step.step * codes @ dequantize(view).astype(np.float64).T + bias
    # a bias is rounded to the type, and to whole products of a code and a code
    slack = UNIT * np.abs(bias) + step.step * 0.02
    assert (np.abs(device.ops.to_host(weight.apply(given)) - want) <= 2 * UNIT * np.abs(want) + slack).all()
    rows = device.ops.to_host(weight.gather(device.ops.from_host(np.array([5, 0], np.int32))))
    np.testing.assert_allclose(rows, dequantize(view)[[5, 0]], rtol=1e-2)
    assert weight.apply(device.ops.from_host(np.zeros((0, 256), np.float32), "bfloat16")).shape == (0, 24)


@pytest.mark.parametrize(
    ("scale", "biased", "kind"),
    [
        (0.0, True, "RoundedByToken"),
        (0.0, False, "RoundedAsCalibrated"),
        (1e-39, True, "RoundedByToken"),
        (1e-10, True, "RoundedByToken"),
        (1e-6, True, "RoundedAsCalibrated"),
        (1e-10, False, "RoundedAsCalibrated"),
    ],
    ids=["zero", "zero-no-bias", "subnormal", "tiny", "small", "tiny-no-bias"],
)
def test_a_bias_is_kept_where_the_scale_of_its_row_is_tiny(device, scale, biased, kind):
    """In int32 it would be lost in a row without a scale, and exceed int32 in one with a tiny one."""
    step = ActivationStep(0.0271, -17)
    view = by_row("INT8_128_F32_A8", 24, 256, step=step, odd=(7, scale))
    bias = np.linspace(-1, 1, 24).astype(np.float32) if biased else None
    weight = packed(device, view, bias=bias)
    assert type(weight).__name__ == kind
    given = device.ops.from_host(np.random.default_rng(4).normal(size=(3, 256)).astype(np.float32), "bfloat16")
    got = device.ops.to_host(weight.apply(given))
    assert np.isfinite(got).all()
    expected = bias[7] if biased else 0.0
    # 256 products of codes are the most that the row itself adds
    assert (np.abs(got[:, 7] - expected) <= 2 * UNIT * abs(expected) + 256 * 128 * 255 * scale * step.step).all()


def test_float16_takes_a_step_for_each_token(device):
    """The device would cut scales to 19 bits for one step and float16 results."""
    view = by_row("INT8_128_F32_A8", 24, 256, step=ActivationStep(0.0271, 0))
    assert type(packed(device, view, "float16")).__name__ == "RoundedByToken"


def test_rows_of_different_calibrated_steps_take_one_for_each_token(device):
    halves = [by_row("INT8_128_F32_A8", 12, 256, step=ActivationStep(step, 0)) for step in (0.01, 0.02)]
    spec = LinearSpec(name="w", out_features=24, in_features=256, dtype="bfloat16")
    weight = device.linear_methods()[0].pack(halves, spec, None)
    assert type(weight).__name__ == "RoundedByToken"


def test_w8a8_lies_in_fractal_nz_and_w4_in_half_a_byte(device, torch_npu):
    eight = packed(device, by_row("INT8_128_F32_A8", 24, 256))
    assert torch_npu.get_npu_format(eight.tensors[0]) == 29
    four = packed(device, by_row("INT4_128_F16", 24, 256))
    assert four.tensors[0].nbytes == 24 * 256 // 2


def test_scales_that_float16_does_not_hold_are_widened_at_load(device):
    view = by_row("INT8_128_F32", 24, 256, scale=1e-6)
    assert type(packed(device, view, "float16")).__name__ == "DenseWeight"
    assert type(packed(device, view, "bfloat16")).__name__ == "WidenedOnTheWay"


def test_what_is_not_taken_is_said(device):
    method = device.linear_methods()[0]

    def why(fmt: str, columns: int = 256, rows: int = 8, dtype: str = "float16", quantize: str | None = None) -> str:
        spec = LinearSpec(name="w", out_features=rows, in_features=columns, dtype=dtype, quantize=quantize)
        said = method.claims(fmt, spec)
        assert said is not None
        return said

    assert why("Q4_K") == "torch_npu has no product for Q4_K"
    assert "not float32" in why("Q4_0", dtype="float32")
    assert "no whole blocks of 128" in why("INT8_128_F32", columns=192)
    assert "sizes up to 65535" in why("Q8_0", rows=70000)
    assert "INT4 was asked for" in why("F32", quantize="INT4")
    spec = LinearSpec(name="w", out_features=9, in_features=256, dtype="float16")
    with pytest.raises(UnsupportedError, match="needs 9 rows, but its tensors have 24"):
        method.pack((by_row("Q8_0", 24, 256),), spec, None)
