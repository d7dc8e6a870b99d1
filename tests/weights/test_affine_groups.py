"""Checkpoints with affine groups: three tensors read as one, exact values, and what does not fit together."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from cardan.config import ModelConfig
from cardan.errors import CheckpointError
from cardan.quantization import AFFINE_FORMATS, FORMATS, dequantize
from cardan.weights import open_checkpoint

LINEAR = "model.layers.0.mlp.up_proj"


def affine(rows, columns, bits, group, seed=0):
    """Codes packed by a loop over bits, float16 scales and biases, and the values they mean."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (rows, columns))
    scales, biases = (rng.normal(size=(rows, columns // group)).astype(np.float16) for _ in range(2))
    per_word = 32 // bits
    words = np.zeros((rows, columns // per_word), np.uint32)
    for place in range(per_word):
        words |= (codes[:, place::per_word] << (place * bits)).astype(np.uint32)
    wide = (np.repeat(part.astype(np.float64), group, axis=1) for part in (scales, biases))
    scale, bias = wide
    return words, scales, biases, codes * scale + bias


def write(folder, tensors, **quantization):
    folder.mkdir(exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "quantization": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(ModelConfig(model=str(folder)))


def three(words, scales, biases, module=LINEAR):
    return {f"{module}.weight": words, f"{module}.scales": scales, f"{module}.biases": biases}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_three_tensors_are_read_as_one(tmp_path, bits, group):
    *parts, values = affine(6, 256, bits, group)
    norm = np.ones(8, np.float32)
    checkpoint = write(tmp_path / "m", {**three(*parts), "norm.weight": norm}, bits=bits, group_size=group)
    fmt = f"AFFINE{bits}_{group}_F16"
    assert checkpoint.tensor_info() == {f"{LINEAR}.weight": (fmt, (6, 256)), "norm.weight": ("F32", (8,))}
    view = checkpoint.tensor(f"{LINEAR}.weight")
    np.testing.assert_allclose(checkpoint.dequantize(view), values, rtol=1e-6, atol=1e-6)
    assert (FORMATS[fmt].bits, FORMATS[fmt].group) == (bits, group)
    checkpoint.close()


def test_scales_may_be_bfloat16_or_float32():
    codes = np.arange(16, dtype=np.uint8)
    packed = np.tile(codes[::2] | (codes[1::2] << 4), 2)
    for fmt, raw in (("F32", np.array([0.5, -2.0], "<f4")), ("BF16", np.array([0x3F00, 0xC000], "<u2"))):
        block = np.concatenate((raw.view(np.uint8), packed))
        from cardan.types import TensorView

        view = TensorView("w", f"AFFINE4_32_{fmt}", (1, 32), block.data)
        np.testing.assert_array_equal(dequantize(view)[0], np.tile(codes, 2) * 0.5 - 2.0)
    assert len(AFFINE_FORMATS) == 18


def test_modules_may_have_groups_of_their_own(tmp_path):
    *parts, _ = affine(4, 128, 4, 64)
    *other, values = affine(4, 128, 8, 32, seed=1)
    tensors = {**three(*parts), **three(*other, module="lm_head")}
    checkpoint = write(tmp_path / "m", tensors, bits=4, group_size=64, lm_head={"bits": 8, "group_size": 32})
    assert checkpoint.tensor_info()["lm_head.weight"] == ("AFFINE8_32_F16", (4, 128))
    np.testing.assert_allclose(checkpoint.dequantize(checkpoint.tensor("lm_head.weight")), values, rtol=1e-6, atol=1e-6)
    checkpoint.close()


@pytest.mark.parametrize(
    ("change", "quantization", "message"),
    [
        ({}, {"mode": "mxfp4"}, r"quantization.mode is 'mxfp4'; Cardan reads affine groups only. Choose"),
        (
            {},
            {"group_size": 48},
            r"affine groups of 48 with \d+ bits and F16 scales; Cardan reads groups of 32, 64, 128",
        ),
        (
            {},
            {"group_size": "64"},
            r"quantization.group_size must be a whole number above 0, got '64' for model.layers",
        ),
        ({"biases": None}, {}, r".biases missing do not belong together: expected as many rows.*Fetch"),
        ({"scales": np.ones((4, 3), np.float16)}, {}, r".scales \[4, 3\] and .biases \[4, 2\] do not belong together"),
        ({"weight": np.ones((4, 17), np.uint32)}, {}, r".weight has 17 words a row, but 128 codes of 4 bits take 16"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, change, quantization, message):
    *parts, _ = affine(4, 128, 4, 64)
    tensors = three(*parts)
    for part, value in change.items():
        if value is None:
            del tensors[f"{LINEAR}.{part}"]
        else:
            tensors[f"{LINEAR}.{part}"] = value
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path / "m", tensors, **{"bits": 4, "group_size": 64, **quantization})
