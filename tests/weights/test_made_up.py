"""Random weights: the same from the same seed, of the right shape and format, and usable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cardan.errors import CheckpointError, ConfigError
from cardan.weights import ModelDescription, RandomCheckpoint, TokenizerSource

SHAPES = {
    "model.embed_tokens.weight": (50, 64),
    "model.layers.0.mlp.up_proj.weight": (96, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 90),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.self_attn.q_norm.weight": (16,),
    "model.layers.0.self_attn.q_proj.bias": (64,),
}


def make(seed: int = 1, dtype: str = "BF16") -> RandomCheckpoint:
    description = ModelDescription(
        path=Path("/x"), name="x", config={"a": 1}, tokenizer=TokenizerSource(folder=Path("/x"))
    )
    return RandomCheckpoint(description, SHAPES, seed, dtype)


def values(checkpoint: RandomCheckpoint, name: str) -> np.ndarray:
    return checkpoint.dequantize(checkpoint.tensor(name))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_shapes_and_formats(dtype: str) -> None:
    checkpoint = make(dtype=dtype)
    info = checkpoint.tensor_info()
    assert {name: shape for name, (_, shape) in info.items()} == SHAPES
    assert info["model.layers.0.mlp.up_proj.weight"][0] == dtype
    assert info["model.layers.0.input_layernorm.weight"][0] == "F32"
    whole = not dtype.startswith("Q")
    assert info["model.layers.0.mlp.down_proj.weight"][0] == (dtype if whole else "F32")
    for name, (fmt, shape) in info.items():
        view = checkpoint.tensor(name)
        assert (view.name, view.dtype, view.shape) == (name, fmt, shape)
        assert values(checkpoint, name).shape == shape
    assert checkpoint.config == {"a": 1}


def test_the_seed_and_the_name_give_the_values() -> None:
    name, other = "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"
    first = make(1).tensor(name).data
    assert first == make(1).tensor(name).data
    assert first != make(2).tensor(name).data
    assert first[:100] != make(1).tensor(other).data[:100]


def test_norms_are_one_and_biases_are_zero() -> None:
    checkpoint = make()
    assert (values(checkpoint, "model.layers.0.self_attn.q_norm.weight") == 1).all()
    assert (values(checkpoint, "model.layers.0.self_attn.q_proj.bias") == 0).all()
    weights = values(checkpoint, "model.embed_tokens.weight")
    assert abs(weights.std() - 0.02) < 0.002
    assert abs(weights.mean()) < 0.002


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match="Random weights can be F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q8_0, got 'Q4_K'"):
        make(dtype="Q4_K")
    with pytest.raises(ConfigError, match="--random-weights must be 0 or more, got -1"):
        make(seed=-1)
    with pytest.raises(CheckpointError, match="has no tensor 'y'"):
        make().tensor("y")
