"""Checkpoints of every method: each tensor has the values that the format's description gives, to the bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from quantized_checkpoints import METHODS, shapes, write

from cardan.config import ModelConfig
from cardan.quantization import FORMATS
from cardan.weights import open_checkpoint

FORMAT_OF = {
    **{f"awq-{group}": f"AFFINE4_{group}_F32" for group in (32, 64, 128)},
    **{
        f"gptq{bits}-{group}-{kind}": f"AFFINE{bits}_{group}_F32" if kind == "asym" else f"INT{bits}_{group}_F16"
        for bits in (4, 8)
        for group, kind in ((32, "sym"), (64, "asym"), (128, "sym"), (128, "asym"))
    },
    "gptq4--1-sym": "INT4_128_F16",
    "gptq8--1-sym": "INT8_128_F16",
    "gptq4-act-order": "INT4_32_F16",
    "gptq8-act-order-asym": "AFFINE8_64_F32",
    "gptq4-v2": "AFFINE4_32_F32",
    "gptq4-older-file": "AFFINE4_32_F32",
    "fp8-blocks": "FP8_128_F32",
    "fp8-blocks-bf16": "FP8_128_F32",
    "fp8-small-blocks": "FP8_32_F32",
    "fp8-tensor-static": "FP8_128_F32",
    "ct-fp8-rows": "FP8_128_F32",
    "ct-fp8-tensor": "FP8_128_F32",
    "ct-fp8-blocks": "FP8_128_F32",
    "ct-int4": "INT4_32_F16",
    "ct-int4-asym": "AFFINE4_128_F32",
    "ct-int8-act-order": "INT8_64_F16",
    "ct-int4-rows": "INT4_128_F16",
    "ct-w8a8": "INT8_128_F32_A8",
    "ct-int8-weights": "INT8_128_BF16",
    "ct-mxfp4": "MXFP4",
    "mxfp4": "MXFP4",
}


@pytest.mark.parametrize("name", METHODS)
def test_values_are_those_of_the_description(tmp_path, name):
    values = write(tmp_path / "m", METHODS[name])
    checkpoint = open_checkpoint(ModelConfig(model=str(tmp_path / "m")))
    info = checkpoint.tensor_info()
    assert {key: shape for key, (_, shape) in info.items()} == shapes()
    dense = {key for key, (fmt, _) in info.items() if not FORMATS[fmt].quantized}
    linears = {key for key in shapes() if "proj" in key or "lm_head" in key}
    left_out = {key for key in linears if any(part in key for part in METHODS[name].left_out)}
    assert linears - dense == linears - left_out
    for key in sorted(linears - dense):
        assert info[key][0] == FORMAT_OF[name]
    for key, want in values.items():
        view = checkpoint.tensor(key)
        assert checkpoint.num_bytes(key) == len(view.data)
        np.testing.assert_array_equal(checkpoint.dequantize(view), want.astype(np.float32))
    checkpoint.close()


def test_every_method_is_tried():
    assert FORMAT_OF.keys() == METHODS.keys()


@pytest.mark.parametrize(
    ("name", "summary"),
    [
        ("awq-64", "AWQ, 4 bits with zero points, groups of 64, in 13 linears"),
        ("gptq4-act-order", "GPTQ, 4 bits symmetric, groups of 32, columns in act-order, in 14 linears"),
        ("gptq8--1-sym", "GPTQ, 8 bits symmetric, a scale for each row, in 14 linears"),
        (
            "fp8-tensor-static",
            "FP8 (E4M3), one scale for each tensor or row; made for activations in FP8 with static scales, which are "
            "multiplied as they are instead, in 14 linears",
        ),
        (
            "ct-w8a8",
            "compressed-tensors, int8, a scale for each channel; made for activations in int8, dynamic, a scale for "
            "each token, part of the format, in 13 linears",
        ),
        (
            "ct-fp8-rows",
            "compressed-tensors, float8, a scale for each channel; made for activations in float8, dynamic, a scale "
            "for each token, which are multiplied as they are instead, in 13 linears",
        ),
        ("ct-int4-asym", "compressed-tensors, int4 with zero points, groups of 128, in 13 linears"),
        ("mxfp4", "MXFP4, groups of 32, in 13 linears"),
    ],
)
def test_the_method_is_told(tmp_path, name, summary):
    write(tmp_path / "m", METHODS[name])
    checkpoint = open_checkpoint(ModelConfig(model=str(tmp_path / "m")))
    assert checkpoint.notes == (f"the checkpoint is quantized: {summary}",)
    checkpoint.close()


def test_a_dense_checkpoint_has_no_notes(tmp_path):
    write(tmp_path / "m", METHODS["awq-64"])
    config = json.loads((tmp_path / "m/config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(ModelConfig(model=str(tmp_path / "m")))
    assert checkpoint.notes == ()
    assert "model.layers.0.mlp.up_proj.qweight" in checkpoint.tensor_info()
    checkpoint.close()
