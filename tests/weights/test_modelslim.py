"""Checkpoints of ModelSlim: recognised by their description, exact to their values, and refused where not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_checkpoints as made
from modelslim_checkpoints import KINDS, STEP, broken, static, write

from cardan.config import EngineConfig, ModelConfig, PlatformConfig
from cardan.engine.extensions import apply_installed_plugins
from cardan.engine.preparation import resolve_plan
from cardan.errors import CheckpointError, UnsupportedError
from cardan.quantization import ActivationStep, activation_step
from cardan.weights import open_checkpoint
from cardan_modelslim import DESCRIPTION


@pytest.fixture(autouse=True)
def plugins() -> None:
    apply_installed_plugins()


def opened(folder: Path):
    return open_checkpoint(ModelConfig(model=str(folder)))


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_that_the_description_means(tmp_path, kind):
    values = write(tmp_path, kind)
    checkpoint = opened(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    assert checkpoint.tensor(name).dtype == KINDS[kind][1]
    for name, want in values.items():
        np.testing.assert_allclose(checkpoint.dequantize(checkpoint.tensor(name)), want, rtol=1e-5, atol=1e-5)
    assert checkpoint.quantized_by == ("modelslim", "ascend")
    assert f"ModelSlim {kind.split()[0]}" in checkpoint.notes[0]
    static = kind.split()[0] == "W8A8"
    assert ("one step for all activations" in checkpoint.notes[0]) == static
    assert activation_step(checkpoint.tensor("model.embed_tokens.weight")) is None
    rounded = activation_step(checkpoint.tensor("model.layers.1.mlp.up_proj.weight"))
    assert rounded == (ActivationStep(float(np.float32(STEP)), 3) if static else None)


@pytest.mark.parametrize("name", ["ascend", "modelslim", "MODELSLIM", "INT8_128_F32_A8"])
def test_quantization_takes_the_names_of_the_method(tmp_path, name):
    write(tmp_path, "W8A8_DYNAMIC")
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path), quantization=name), platform=PlatformConfig(platform="cpu")
    )
    setting = resolve_plan(config).settings["quantization"]
    assert (setting.value, setting.why) == ("INT8_128_F32_A8", "--quantization; the checkpoint is in it")


def test_other_methods_are_refused_for_it(tmp_path):
    write(tmp_path, "W8A8_DYNAMIC")
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path), quantization="awq"), platform=PlatformConfig(platform="cpu")
    )
    with pytest.raises(UnsupportedError, match="got 'awq'"):
        resolve_plan(config)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (
            {"model.layers.0.mlp.up_proj.weight": "W4A4_DYNAMIC"},
            "is W4A4_DYNAMIC, and of ModelSlim's types",
        ),
        ({"model.norm.bias": "FLOAT"}, r"model\.norm\.bias is a bias that smoothing gave a norm"),
        ({"kv_quant_type": "C8"}, "keys and values are C8"),
    ],
)
def test_what_is_not_read_is_refused_with_what_would_work(tmp_path, described, said):
    write(tmp_path, "W8A8_DYNAMIC", described)
    with pytest.raises(CheckpointError, match=said) as caught:
        opened(tmp_path)
    assert "Choose a checkpoint of W8A8, W8A8_DYNAMIC or W8A16" in str(caught.value)


def test_a_config_that_names_the_method_needs_the_description(tmp_path):
    write(tmp_path, "W8A8_DYNAMIC")
    (tmp_path / DESCRIPTION).unlink()
    config = {**made.CONFIG, "quantization_config": {"quant_method": "ascend"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"has no {DESCRIPTION}"):
        opened(tmp_path)


def test_a_step_that_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, "W8A8", (broken, "INT8_128_F32_A8"))
    write(tmp_path, "W8A8")
    with pytest.raises(CheckpointError, match="input_scale must be one positive number"):
        opened(tmp_path).tensor("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("offset", [3.5, 200.0])
def test_a_code_of_zero_that_is_none_is_refused(tmp_path, monkeypatch, offset):
    def odd(weight: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        parts, values = static(weight, int64=False)
        return {**parts, ".input_offset": np.array([offset], np.float32)}, values

    monkeypatch.setitem(KINDS, "W8A8", (odd, "INT8_128_F32_A8"))
    write(tmp_path, "W8A8")
    with pytest.raises(CheckpointError, match=r"input_offset must be one whole number of -128 \.\. 127"):
        opened(tmp_path).tensor("model.layers.0.mlp.up_proj.weight")
