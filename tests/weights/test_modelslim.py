"""Checkpoints of ModelSlim: recognised by their description, exact to their values, and refused where not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import quantized_checkpoints as made

from cardan.config import EngineConfig, ModelConfig, PlatformConfig
from cardan.engine.extensions import apply_installed_plugins
from cardan.engine.preparation import resolve_plan
from cardan.errors import CheckpointError, UnsupportedError
from cardan.weights import open_checkpoint
from cardan_modelslim import DESCRIPTION

INDEX = "quant_model_weights.safetensors.index.json"


@pytest.fixture(autouse=True)
def plugins() -> None:
    apply_installed_plugins()


def dynamic(weight: np.ndarray, offset: float = 0.0) -> tuple[dict[str, Any], np.ndarray]:
    scale = (np.abs(weight).max(axis=1, keepdims=True) / 100).astype(np.float32)
    offsets = np.full_like(scale, offset)
    codes = np.clip(np.round(weight / scale) + offsets, -128, 127).astype(np.int8)
    tensors = {".weight": codes, ".weight_scale": scale, ".weight_offset": offsets}
    return tensors, (codes.astype(np.float64) - offsets) * scale.astype(np.float64)


def static(weight: np.ndarray, int64: bool) -> tuple[dict[str, Any], np.ndarray]:
    tensors, _ = dynamic(weight)
    step = np.array([0.02], np.float32)
    product = (tensors[".weight_scale"][:, 0] * step).astype(np.float32)
    stored = product.view(np.uint32).astype(np.int64) if int64 else product
    parts = {
        ".weight": tensors[".weight"],
        ".input_scale": step,
        ".input_offset": np.array([3], np.float32),
        ".deq_scale": stored,
        ".quant_bias": np.zeros(len(weight), np.int32),
    }
    return parts, tensors[".weight"].astype(np.float64) * (product / step)[:, None].astype(np.float64)


KINDS = {
    "W8A8_DYNAMIC": (dynamic, "INT8_128_F32_A8"),
    "W8A16": (dynamic, "INT8_128_F32"),
    "W8A16 with offsets": (lambda weight: dynamic(weight, 7.0), "AFFINE8_128_F32"),
    "W8A8": (lambda weight: static(weight, int64=False), "INT8_128_F32_A8"),
    "W8A8 for float16": (lambda weight: static(weight, int64=True), "INT8_128_F32_A8"),
}


def write(folder: Path, kind: str, described: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """A checkpoint as ModelSlim leaves it behind; returns the values that it means."""
    rng = np.random.default_rng(1)
    tensors: dict[str, Any] = {}
    values: dict[str, np.ndarray] = {}
    description: dict[str, Any] = {"model_quant_type": kind.split(maxsplit=1)[0], "version": "1.0.0"}
    for name, shape in made.shapes().items():
        drawn = rng.normal(size=shape).astype(np.float32) / (1 if len(shape) == 1 else shape[-1] ** 0.5)
        module = name.removesuffix(".weight")
        if len(shape) == 1 or "embed" in name or "lm_head" in name:
            tensors[name], values[name], description[name] = drawn, drawn.astype(np.float64), "FLOAT"
            continue
        parts, values[name] = KINDS[kind][0](drawn)
        tensors |= {module + end: part for end, part in parts.items()}
        description |= {module + end: kind.split(maxsplit=1)[0] for end in parts}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(made.CONFIG))
    (folder / DESCRIPTION).write_text(json.dumps({**description, **(described or {})}))
    names = sorted(tensors)
    files = {
        "quant_model_weights-00001-of-00002.safetensors": names[::2],
        "quant_model_weights-00002-of-00002.safetensors": names[1::2],
    }
    for file, held in files.items():
        made.save(folder / file, {name: tensors[name] for name in held})
    where = {name: file for file, held in files.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return values


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
    assert ("not the checkpoint's" in checkpoint.notes[0]) == (kind.split()[0] == "W8A8")


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


def broken(weight: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    parts, values = static(weight, int64=False)
    return {**parts, ".input_scale": np.array([0], np.float32)}, values
