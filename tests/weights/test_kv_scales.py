"""Scales of keys and values: found under every name, given to the model's layers, and refused where they are wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_checkpoints as made

from cardan.config import ModelConfig
from cardan.errors import CheckpointError, ModelConfigError
from cardan.models import build_model
from cardan.platform import Model
from cardan.weights import OpenedCheckpoint, open_checkpoint

ATTENTION = "model.layers.{}.self_attn."
BOTH = [(0.5, 2.0), (0.25, 0.125)]
"""Of keys and values, for each of the two layers."""
NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "below attn": ("attn.k_scale", "attn.v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "quark": ("k_proj.output_scale", "v_proj.output_scale"),
    "fused": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
}


def scales(names: tuple[str, str], pairs: list[tuple[Any, Any]], prefix: str = ATTENTION) -> made.Tensors:
    found: made.Tensors = {}
    for layer, pair in enumerate(pairs):
        for name, value in zip(names, pair, strict=True):
            held = isinstance(value, made.Raw)
            found[prefix.format(layer) + name] = value if held else np.asarray(value, np.float32)
    return found


def opened(folder: Path, more: made.Tensors) -> OpenedCheckpoint:
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in made.shapes().items()}
    made.write_dense(folder, values)
    made.save(folder / "model.safetensors", {**values, **more})
    return open_checkpoint(ModelConfig(model=str(folder)))


def model_of(checkpoint: OpenedCheckpoint) -> Model:
    return build_model(checkpoint.config, checkpoint.name, checkpoint.tensor_info())


def pairs_of(model: Model) -> list[tuple[float, float]]:
    return [(layer.k_scale, layer.v_scale) for layer in model.facts.layers]


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_scales_reach_the_layers_under_every_name(tmp_path: Path, names: tuple[str, str]) -> None:
    checkpoint = opened(tmp_path, scales(names, BOTH))
    model = model_of(checkpoint)
    assert pairs_of(model) == BOTH
    assert model.unused_tensors() == ()  # type: ignore[attr-defined]
    assert checkpoint.tensor_info().keys() == made.shapes().keys()
    assert checkpoint.notes == ()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", ""])
def test_scales_of_the_language_model_are_told_from_those_of_a_vision_tower(tmp_path: Path, prefix: str) -> None:
    language = scales(NAMES["compressed-tensors"], BOTH, prefix + "layers.{}.self_attn.")
    vision = scales(NAMES["compressed-tensors"], [(9.0, 9.0)], "vision_tower.layers.{}.self_attn.")
    checkpoint = opened(tmp_path, {**language, **vision})
    assert checkpoint.config["cardan_kv_scales"] == {"0": [0.5, 2.0], "1": [0.25, 0.125]}
    assert vision.keys() <= checkpoint.tensor_info().keys()


def test_one_scale_may_be_for_keys_and_values(tmp_path: Path) -> None:
    one = {ATTENTION.format(layer) + "kv_scale": np.float32([0.75]) for layer in range(2)}
    assert pairs_of(model_of(opened(tmp_path, one))) == [(0.75, 0.75)] * 2


def test_layers_without_scales_have_1(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, scales(NAMES["compressed-tensors"], BOTH[:1]))
    assert pairs_of(model_of(checkpoint)) == [(0.5, 2.0), (1.0, 1.0)]
    assert pairs_of(model_of(opened(tmp_path / "none", {}))) == [(1.0, 1.0)] * 2


def test_scales_of_16_bits_are_read(tmp_path: Path) -> None:
    narrow = made.bf16(np.float32([0.3]))
    expected = float(made.bf16_values(narrow)[0])
    checkpoint = opened(tmp_path, scales(NAMES["compressed-tensors"], [(narrow, np.float32(2.0))]))
    assert pairs_of(model_of(checkpoint))[0] == (expected, 2.0)


def test_of_scales_for_each_head_the_largest_is_taken_and_said_so(tmp_path: Path) -> None:
    per_head = [(np.float32([0.5, 0.75]), np.float32([[2.0], [1.0]]))]
    checkpoint = opened(tmp_path, scales(NAMES["compressed-tensors"], per_head))
    assert pairs_of(model_of(checkpoint))[0] == (0.75, 2.0)
    (note,) = checkpoint.notes
    assert "a scale of keys and values for each head; the largest of a layer is taken" in note


@pytest.mark.parametrize("method", ["ct-fp8-tensor", "fp8", "gptq"])
def test_scales_stand_beside_quantized_linears(tmp_path: Path, method: str) -> None:
    chosen = next(found for name, found in made.METHODS.items() if name.startswith(method))
    plain = made.write(tmp_path / "plain", chosen)
    before = open_checkpoint(ModelConfig(model=str(tmp_path / "plain")))
    written: dict[str, Any] = {}
    save = made.save

    def save_with_scales(path: Path, tensors: made.Tensors) -> None:
        written.update(tensors)
        save(path, {**tensors, **scales(NAMES["modelopt"], BOTH)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "save", save_with_scales)
        made.write(tmp_path / "scaled", replace(chosen))
    after = open_checkpoint(ModelConfig(model=str(tmp_path / "scaled")))
    assert written
    assert after.tensor_info() == before.tensor_info()
    assert after.quantized_by == before.quantized_by
    assert pairs_of(model_of(after)) == BOTH
    name = "model.layers.0.self_attn.k_proj.weight"
    np.testing.assert_allclose(after.dequantize(after.tensor(name)), plain[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_a_scale_must_be_a_positive_number(tmp_path: Path, value: float) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_scale must hold finite numbers above 0, by"):
        opened(tmp_path, scales(NAMES["compressed-tensors"], [(value, 1.0)]))


def test_an_empty_scale_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must hold finite numbers above 0"):
        opened(tmp_path, scales(NAMES["compressed-tensors"], [(np.zeros(0, np.float32), 1.0)]))


@pytest.mark.parametrize(("name", "other", "lacking"), [("k_scale", "keys", "values"), ("v_scale", "values", "keys")])
def test_keys_and_values_need_a_scale_each(tmp_path: Path, name: str, other: str, lacking: str) -> None:
    with pytest.raises(CheckpointError, match=f"Layer 1 has a scale for {other} and none for {lacking}"):
        opened(tmp_path, {ATTENTION.format(1) + name: np.float32(0.5)})


def test_two_names_must_say_the_same(tmp_path: Path) -> None:
    twice = {**scales(NAMES["compressed-tensors"], BOTH), **scales(NAMES["quark"], BOTH)}
    assert pairs_of(model_of(opened(tmp_path / "same", twice))) == BOTH
    twice[ATTENTION.format(0) + "v_proj.output_scale"] = np.float32(3.0)
    with pytest.raises(CheckpointError, match=r"values have the scale 3, and another tensor of layer 0 says 2"):
        opened(tmp_path / "other", twice)


@pytest.mark.parametrize("wrong", [[1.0], [0.0, 1.0], [1.0, -2.0], ["a", "b"]])
def test_a_config_that_says_nonsense_of_scales_is_refused(wrong: list[Any]) -> None:
    with pytest.raises(ModelConfigError, match=r"cardan_kv_scales\.1 ="):
        build_model({**made.CONFIG, "cardan_kv_scales": {"1": wrong}}, "tiny", None)
