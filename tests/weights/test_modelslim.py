"""Checkpoints of ModelSlim: recognised by their description, exact to their values, and refused where not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_checkpoints as made
from modelslim_checkpoints import KINDS, STEP, ZERO, static, write

from cardan.config import EngineConfig, ModelConfig, PlatformConfig
from cardan.engine.extensions import apply_installed_plugins
from cardan.engine.preparation import resolve_plan
from cardan.errors import CheckpointError, UnsupportedError
from cardan.quantization import ActivationStep, activation_step
from cardan.weights import open_checkpoint
from cardan_modelslim import DESCRIPTION

UP = "model.layers.0.mlp.up_proj"


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
    assert rounded == (ActivationStep(float(np.float32(STEP)), ZERO) if static else None)


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
        ({"group_size": "many"}, "group_size must be a whole number from 0 on, got 'many'"),
        ({"group_size": -32}, "group_size must be a whole number from 0 on, got -32"),
        ({"group_size": True}, "group_size must be a whole number from 0 on, got True"),
    ],
)
def test_what_is_not_read_is_refused_with_what_would_work(tmp_path, described, said):
    write(tmp_path, "W8A8_DYNAMIC", described)
    with pytest.raises(CheckpointError, match=said) as caught:
        opened(tmp_path)
    assert "Choose a checkpoint of W8A8, W8A8_DYNAMIC or W8A16" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "said"), [("FLOAT", "says that it is FLOAT"), (None, "does not name it")], ids=["FLOAT", "unnamed"]
)
def test_codes_that_the_description_does_not_name_are_refused(tmp_path, kind, said):
    """They would be taken for the values themselves."""
    name = f"{UP}.weight"
    write(tmp_path, "W8A8_DYNAMIC", {name: kind})
    if kind is None:
        file = tmp_path / DESCRIPTION
        described = json.loads(file.read_text())
        file.write_text(json.dumps({key: value for key, value in described.items() if key != name}))
    with pytest.raises(CheckpointError, match=rf"{UP}\.weight holds codes of int8, and .*json {said}\. Fetch"):
        opened(tmp_path)


def in_groups(weight: np.ndarray, offsets: int) -> tuple[dict[str, Any], np.ndarray]:
    """A scale for each 64 columns, and so many rows of offsets."""
    groups = weight.shape[1] // 64
    scale = np.full((len(weight), groups), 0.01, np.float32)
    codes = np.clip(np.round(weight / 0.01), -128, 127).astype(np.int8)
    return {".weight": codes, ".weight_scale": scale, ".weight_offset": np.ones((offsets, groups), np.float32)}, weight


@pytest.mark.parametrize(
    ("group", "fewer", "said"),
    [
        (64, 0, None),
        (0, 0, None),
        (32, 0, "has one scale for each 64 columns, and .* says group_size 32"),
        (64, 3, r"weight_offset has shape \[\d+, 2\], expected \[\d+, 2\]"),
    ],
)
def test_scales_and_offsets_are_as_many_as_the_description_says(tmp_path, monkeypatch, group, fewer, said):
    made_so = (lambda weight: in_groups(weight, len(weight) - fewer), "AFFINE8_64_F32")
    monkeypatch.setitem(KINDS, "W8A16", made_so)
    write(tmp_path, "W8A16", {"group_size": group})
    name = "model.layers.0.self_attn.q_proj.weight"
    if said is None:
        assert opened(tmp_path).tensor(name).dtype == "AFFINE8_64_F32"
        return
    with pytest.raises(CheckpointError, match=said):
        opened(tmp_path).tensor(name)


def test_a_config_that_names_the_method_needs_the_description(tmp_path):
    write(tmp_path, "W8A8_DYNAMIC")
    (tmp_path / DESCRIPTION).unlink()
    config = {**made.CONFIG, "quantization_config": {"quant_method": "ascend"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"has no {DESCRIPTION}"):
        opened(tmp_path)


def changed(folder: Path, monkeypatch: pytest.MonkeyPatch, given: float | None = None, **changes: Any) -> Any:
    """A checkpoint of W8A8 whose linears all have some tensors changed; a change is an array or made of one."""

    def odd(weight: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        bias = None if given is None else np.full(len(weight), given, np.float32)
        parts, values = static(weight, int64=False, bias=bias)
        for name, change in changes.items():
            parts[f".{name}"] = change(parts[f".{name}"]) if callable(change) else np.array([change], np.float32)
        return {name: part for name, part in parts.items() if part is not None}, values

    monkeypatch.setitem(KINDS, "W8A8", (odd, "INT8_128_F32_A8"))
    write(folder, "W8A8")
    return opened(folder)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (0, "input_scale must be one positive number, got"),
        (-0.1, "input_scale must be one positive number, got"),
        (np.nan, "input_scale holds NaN or infinity"),
        (np.inf, "input_scale holds NaN or infinity"),
    ],
)
def test_a_step_that_is_none_is_refused(tmp_path, monkeypatch, step, said):
    checkpoint = changed(tmp_path, monkeypatch, input_scale=step)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.tensor(f"{UP}.weight")


@pytest.mark.parametrize("offset", [3.5, 200.0])
def test_a_code_of_zero_that_is_none_is_refused(tmp_path, monkeypatch, offset):
    checkpoint = changed(tmp_path, monkeypatch, input_offset=offset)
    with pytest.raises(CheckpointError, match=r"input_offset must be one whole number of -128 \.\. 127"):
        checkpoint.tensor(f"{UP}.weight")


@pytest.mark.parametrize("bias", [0.3, -2000.0])
def test_a_bias_beside_what_it_became_is_read_as_it_is(tmp_path, monkeypatch, bias):
    checkpoint = changed(tmp_path, monkeypatch, bias)
    checkpoint.tensor(f"{UP}.weight")
    assert set(checkpoint.dequantize(checkpoint.tensor(f"{UP}.bias"))) == {np.float32(bias)}


def test_a_bias_that_was_stored_in_fewer_bits_is_the_same(tmp_path, monkeypatch):
    checkpoint = changed(tmp_path, monkeypatch, -77.7, bias=lambda bias: bias.astype(np.float16))
    checkpoint.tensor(f"{UP}.weight")


def test_a_bias_that_is_only_in_quant_bias_is_refused(tmp_path, monkeypatch):
    checkpoint = changed(tmp_path, monkeypatch, -77.7, bias=lambda bias: None)
    with pytest.raises(CheckpointError, match=r"A bias may be in it that is not beside it\. Choose a checkpoint of"):
        checkpoint.tensor(f"{UP}.weight")


@pytest.mark.parametrize(("bias", "more", "said"), [(None, 3, "codes and input_offset"), (0.3, 50, "bias, codes and")])
def test_a_quant_bias_of_other_tensors_is_refused(tmp_path, monkeypatch, bias, more, said):
    checkpoint = changed(tmp_path, monkeypatch, bias, quant_bias=lambda stored: stored + more)
    with pytest.raises(CheckpointError, match=rf"{UP}\.quant_bias is -?\d+ in row 0, -?\d+ is what its {said}"):
        checkpoint.tensor(f"{UP}.weight")


def test_a_row_without_a_scale_has_no_quant_bias_to_hold_it_to(tmp_path, monkeypatch):
    checkpoint = changed(tmp_path, monkeypatch, deq_scale=np.zeros_like)
    assert not checkpoint.dequantize(checkpoint.tensor(f"{UP}.weight")).any()
