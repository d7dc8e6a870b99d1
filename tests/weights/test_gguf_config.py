"""Configs from GGUF metadata: transformers reads the same, and its config classes accept them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from cardan.config import ModelConfig
from cardan.errors import CheckpointError, ModelConfigError, ModelError, UnsupportedModelError
from cardan.weights import open_checkpoint
from cardan.weights.gguf.names import ARCHITECTURES


def config_of(path: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(ModelConfig(model=str(path)))
    checkpoint.close()
    return dict(checkpoint.config)


def same(left: Any, right: Any) -> bool:
    return left == right or (isinstance(left, float) and right == pytest.approx(left, rel=1e-6))


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_has_the_config_that_it_was_made_with(
    smollm2_path: Path, smollm2_reader: gguf.GGUFReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(smollm2_path)
    fields = {key: field for key, field in smollm2_reader.fields.items() if not key.startswith("tokenizer")}
    view = SimpleNamespace(fields=fields, tensors=smollm2_reader.tensors)
    monkeypatch.setattr(gguf, "GGUFReader", lambda _path: view)
    theirs = load_gguf_checkpoint(smollm2_path)["config"]
    different = {
        key: (config[key], theirs[key]) for key in config.keys() & theirs.keys() if not same(config[key], theirs[key])
    }
    assert different.pop("architectures", None) in (None, (["LlamaForCausalLM"], "llama"))
    assert different == {}
    assert len(config.keys() & theirs.keys()) >= 9
    assert config["rms_norm_eps"] == 1e-5  # as in its config.json, though float32 holds 9.99999974e-06
    assert config["rope_theta"] == 100000
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    assert config["tie_word_embeddings"] is True
    assert (config["vocab_size"], config["bos_token_id"], config["eos_token_id"]) == (49152, 1, 2)
    assert "rope_scaling" not in config


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_transformers_reads_the_same(tiny_gguf: Callable[..., Path], architecture: str) -> None:
    path = tiny_gguf(architecture)
    config, theirs = config_of(path), load_gguf_checkpoint(path)["config"]
    shared = (config.keys() & theirs.keys()) - {"architectures", "rms_norm_eps", "model_type"}
    assert len(shared) >= 7
    assert {key: config[key] for key in shared} == {key: pytest.approx(theirs[key]) for key in shared}
    assert config["model_type"] == theirs["model_type"]


CLASSES = {
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig),
    "granite": ("GraniteForCausalLM", transformers.GraniteConfig),
    "qwen2": ("Qwen2ForCausalLM", transformers.Qwen2Config),
    "qwen3": ("Qwen3ForCausalLM", transformers.Qwen3Config),
    "gemma2": ("Gemma2ForCausalLM", transformers.Gemma2Config),
    "gemma3": ("Gemma3ForCausalLM", transformers.Gemma3TextConfig),
    "olmo2": ("Olmo2ForCausalLM", transformers.Olmo2Config),
    "phi3": ("Phi3ForCausalLM", transformers.Phi3Config),
}


def test_every_architecture_is_covered() -> None:
    assert set(CLASSES) == set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", CLASSES)
def test_the_config_class_accepts_every_key(tiny_gguf: Callable[..., Path], architecture: str) -> None:
    """A key that the class did not know would be kept as an extra attribute, so compare with its own fields."""
    name, kind = CLASSES[architecture]
    config = config_of(tiny_gguf(architecture))
    assert config["architectures"] == [name]
    assert hasattr(transformers, name)
    assert config["model_type"] == kind.model_type
    defaults = kind().to_dict().keys() | {"rope_theta", "rope_local_base_freq", "head_dim", "hidden_act", "mlp_bias"}
    defaults |= {"use_sliding_window", "attention_bias", "hidden_activation"}
    assert {key for key in config if key not in defaults and not key.startswith("cardan_")} == set()
    kind(**{key: value for key, value in config.items() if key not in ("architectures", "model_type")})


def test_an_untied_head_is_told_by_its_tensor(tiny_gguf: Callable[..., Path]) -> None:
    assert config_of(tiny_gguf("llama"))["tie_word_embeddings"] is True
    assert config_of(tiny_gguf("llama", tied=False))["tie_word_embeddings"] is False


def test_heads_default_to_equal_parts(tiny_gguf: Callable[..., Path]) -> None:
    change = {
        f"llama.{key}": None for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
    }
    assert config_of(tiny_gguf("llama", change=change))["head_dim"] == 16


def test_a_partial_rotation_is_a_share(tiny_gguf: Callable[..., Path]) -> None:
    assert config_of(tiny_gguf("phi3", change={"phi3.rope.dimension_count": 12}))["partial_rotary_factor"] == 0.75
    assert "partial_rotary_factor" not in config_of(tiny_gguf("phi3"))


def test_biases_are_told_by_their_tensors(tiny_gguf: Callable[..., Path]) -> None:
    bias = {f"blk.{layer}.attn_q.bias": (np.zeros(64, dtype=np.float32), "F32") for layer in range(2)}
    assert config_of(tiny_gguf("llama"))["attention_bias"] is False
    config = config_of(tiny_gguf("llama", tensors=bias))
    assert (config["attention_bias"], config["mlp_bias"]) == (True, False)
    assert config_of(tiny_gguf("qwen3", tensors=bias))["attention_bias"] is True


def test_a_window_makes_llama_mistral(tiny_gguf: Callable[..., Path]) -> None:
    config = config_of(tiny_gguf("llama", change={"llama.attention.sliding_window": 100}))
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 100)


def test_values_that_are_equal_in_every_layer_pass(tiny_gguf: Callable[..., Path]) -> None:
    assert config_of(tiny_gguf("llama", change={"llama.attention.head_count_kv": [2, 2]}))["num_key_value_heads"] == 2


# --- families -----------------------------------------------------------------------------------


def test_granite_has_its_multipliers(tiny_gguf: Callable[..., Path]) -> None:
    config = config_of(tiny_gguf("granite"))
    assert config["embedding_multiplier"] == 12
    assert config["residual_multiplier"] == 0.22
    assert config["logits_scaling"] == 8
    assert config["attention_multiplier"] == 0.015625


def test_gemma2_windows_every_other_layer(tiny_gguf: Callable[..., Path]) -> None:
    config = config_of(tiny_gguf("gemma2"))
    assert config["layer_types"] == transformers.Gemma2Config(num_hidden_layers=2).layer_types
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50, 30)
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (32, 16)
    assert config["cardan_norm_offset"] == 0
    assert config["hidden_activation"] == "gelu_pytorch_tanh"


def many_layers(architecture: str, count: int) -> dict[str, Any]:
    """Enough tensors for ``count`` layers; only their number matters."""
    norm = (np.ones(64, dtype=np.float32), "F32")
    return {f"blk.{layer}.attn_norm.weight": norm for layer in range(count)}


def test_gemma3_windows_five_of_six_layers(tiny_gguf: Callable[..., Path]) -> None:
    config = config_of(tiny_gguf("gemma3", change={"gemma3.block_count": 13}, tensors=many_layers("gemma3", 13)))
    assert config["layer_types"] == transformers.Gemma3TextConfig(num_hidden_layers=13).layer_types
    assert config["rope_local_base_freq"] == 10000
    assert config["cardan_norm_offset"] == 0
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (None, None)


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_divides_queries_by_the_width_of_a_head(
    tiny_gguf: Callable[..., Path], architecture: str, layers: int
) -> None:
    """Gemma 2 27B and Gemma 3 27B: 4608 / 32 = 144 and 5376 / 32 = 168 where heads have 128 features."""
    change = {f"{architecture}.block_count": layers, f"{architecture}.attention.head_count": 2}
    path = tiny_gguf(architecture, change=change, tensors=many_layers(architecture, layers))
    assert config_of(path)["query_pre_attn_scalar"] == 32


def test_gemma_takes_the_scale_of_the_file(tiny_gguf: Callable[..., Path]) -> None:
    assert config_of(tiny_gguf("gemma3", change={"gemma3.attention.scale": 0.125}))["query_pre_attn_scalar"] == 64


def test_a_window_pattern_in_the_file_wins(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("gemma3", change={"gemma3.attention.sliding_window_pattern": [False, True]})
    assert config_of(path)["layer_types"] == ["full_attention", "sliding_attention"]
    path = tiny_gguf("gemma3", change={"gemma3.attention.sliding_window_pattern": 2})
    assert config_of(path)["layer_types"] == ["sliding_attention", "full_attention"]


def test_olmo2_with_windows_is_olmo3(tiny_gguf: Callable[..., Path]) -> None:
    assert config_of(tiny_gguf("olmo2"))["architectures"] == ["Olmo2ForCausalLM"]
    change = {"olmo2.attention.sliding_window": 64, "olmo2.attention.sliding_window_pattern": [True, False]}
    config = config_of(tiny_gguf("olmo2", change=change))
    assert (config["architectures"], config["model_type"]) == (["Olmo3ForCausalLM"], "olmo3")
    assert config["layer_types"] == ["sliding_attention", "full_attention"]


def test_phi3_keeps_its_window(tiny_gguf: Callable[..., Path]) -> None:
    config = config_of(tiny_gguf("phi3"))
    assert (config["sliding_window"], config["original_max_position_embeddings"]) == (128, 256)


# --- RoPE ---------------------------------------------------------------------------------------


def test_linear_scaling(tiny_gguf: Callable[..., Path]) -> None:
    change = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 8.0}
    assert config_of(tiny_gguf("llama", change=change))["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    old = config_of(tiny_gguf("llama", change={"llama.rope.scale_linear": 4.0}))
    assert old["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    change["llama.rope.scaling.factor"] = 1.0
    assert "rope_scaling" not in config_of(tiny_gguf("llama", change=change))


def test_yarn_scaling(tiny_gguf: Callable[..., Path]) -> None:
    change = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 64,
        "qwen2.rope.scaling.yarn_beta_fast": 16.0,
    }
    assert config_of(tiny_gguf("qwen2", change=change))["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
    }


def test_factors_of_frequencies_are_handed_on(tiny_gguf: Callable[..., Path]) -> None:
    factors = np.array([1, 1, 1, 1.5, 2.25, 8, 8, 8], dtype=np.float32)
    path = tiny_gguf("llama", tensors={"rope_freqs.weight": (factors, "F32")})
    config = config_of(path)
    assert config["cardan_rope_factors"] == factors.tolist()
    assert "rope_scaling" not in config
    checkpoint = open_checkpoint(ModelConfig(model=str(path)))
    assert not [name for name in checkpoint.names() if "rope" in name]


def test_the_factors_are_those_that_llama3_scaling_divides_by(tiny_gguf: Callable[..., Path]) -> None:
    """The factor tensor, as converters compute it, turns plain frequencies into those of transformers."""
    pytest.importorskip("torch", reason="transformers computes its frequencies with torch")
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 128, "rope_theta": 50000.0}
    llama = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=scaling)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](llama, "cpu")
    plain = 1 / 50000.0 ** (np.arange(0, 16, 2) / 16)
    factors = (plain / scaled.double().numpy()).astype(np.float32)
    config = config_of(tiny_gguf("llama", tensors={"rope_freqs.weight": (factors, "F32")}))
    ours = 1 / config["rope_theta"] ** (np.arange(0, 16, 2) / 16) / np.array(config["cardan_rope_factors"])
    np.testing.assert_allclose(ours, scaled.numpy(), rtol=1e-6)
    assert max(config["cardan_rope_factors"]) > 1


def test_longrope_has_two_lists(tiny_gguf: Callable[..., Path]) -> None:
    tensors = {
        "rope_factors_long.weight": (np.full(8, 2.5, dtype=np.float32), "F32"),
        "rope_factors_short.weight": (np.full(8, 1.25, dtype=np.float32), "F32"),
    }
    change = {"phi3.rope.scaling.attn_factor": 1.25, "phi3.rope.scaling.original_context_length": 64}
    config = config_of(tiny_gguf("phi3", tensors=tensors, change=change))
    assert config["original_max_position_embeddings"] == 64
    assert config["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": [2.5] * 8,
        "short_factor": [1.25] * 8,
        "attention_factor": 1.25,
    }


# --- refused ------------------------------------------------------------------------------------

VECTOR = (np.ones(8, dtype=np.float32), "F32")

REFUSED: dict[str, tuple[type[ModelError], dict[str, Any], str]] = {
    "missing key": (
        ModelConfigError,
        {"change": {"llama.block_count": None}},
        "lacks the metadata key llama.block_count. Fetch or convert",
    ),
    "another type": (
        ModelConfigError,
        {"change": {"llama.embedding_length": "wide"}},
        "llama.embedding_length must be a whole number above 0, got 'wide'",
    ),
    "zero": (
        ModelConfigError,
        {"change": {"llama.attention.head_count": 0}},
        "head_count must be a whole number above 0",
    ),
    "not finite": (
        ModelConfigError,
        {"change": {"llama.rope.freq_base": float("nan")}},
        "llama.rope.freq_base must be a finite number, got nan",
    ),
    "negative": (
        ModelConfigError,
        {"change": {"llama.rope.freq_base": -1.0}},
        "llama.rope.freq_base must be a number above 0, got -1.0",
    ),
    "text": (ModelConfigError, {"change": {"llama.rope.scaling.type": 3}}, "rope.scaling.type must be text, got 3"),
    "differs between layers": (
        UnsupportedModelError,
        {"change": {"llama.attention.head_count_kv": [1, 2]}},
        "llama.attention.head_count_kv differs between layers, which Cardan does not run",
    ),
    "experts": (UnsupportedModelError, {"change": {"llama.expert_count": 8}}, "is a mixture of 8 experts"),
    "a part": (CheckpointError, {"change": {"split.count": 3}}, "is one of 3 parts of a split GGUF file. Merge them"),
    "no embedding": (
        CheckpointError,
        {"tensors": {"token_embd.weight": None}},
        "has no matrix token_embd.weight among its 19 tensors",
    ),
    "more layers than tensors": (
        CheckpointError,
        {"change": {"llama.block_count": 4_000_000}},
        "announces 4000000 layers, but has 20 tensors",
    ),
    "heads that do not divide": (
        CheckpointError,
        {"change": {"llama.attention.head_count": 5, "llama.attention.key_length": None}},
        "an embedding of 64 does not divide among 5 heads",
    ),
    "odd heads": (
        CheckpointError,
        {"change": {"llama.attention.key_length": 15, "llama.attention.value_length": 15}},
        "heads of 15 features cannot be rotated in pairs",
    ),
    "values of another width": (
        UnsupportedModelError,
        {"change": {"llama.attention.value_length": 8}},
        "keys of 16 and values of 8 features per head are not supported",
    ),
    "heads that do not fit their rows": (
        CheckpointError,
        {"change": {"llama.attention.head_count": 8}},
        r"tensor 'blk.0.attn_q.weight' has 64 rows, but the metadata's 8 heads of 16 take 128",
    ),
    "unknown scaling": (
        UnsupportedModelError,
        {"change": {"llama.rope.scaling.type": "longrope"}},
        "the RoPE scaling 'longrope' without its factors is not supported",
    ),
    "factors of another length": (
        CheckpointError,
        {"tensors": {"rope_freqs.weight": (np.ones(5, dtype=np.float32), "F32")}},
        "rope_freqs.weight has 5 factors for 8 rotary frequencies",
    ),
    "factors that are not positive": (
        CheckpointError,
        {"tensors": {"rope_freqs.weight": (np.zeros(8, dtype=np.float32), "F32")}},
        r"rope_freqs.weight must be a vector of numbers above 0, got F32 of shape \(8,\)",
    ),
    "factors in a matrix": (
        CheckpointError,
        {"tensors": {"rope_freqs.weight": (np.ones((2, 8), dtype=np.float32), "F32")}},
        r"rope_freqs.weight must be a vector",
    ),
    "an unknown tensor": (
        CheckpointError,
        {"tensors": {"blk.0.ffn_gate_exps.weight": VECTOR}},
        "has a tensor 'blk.0.ffn_gate_exps.weight', which llama models of 2 layers do not have",
    ),
    "a layer too many": (
        CheckpointError,
        {"tensors": {"blk.2.attn_norm.weight": VECTOR}},
        "has a tensor 'blk.2.attn_norm.weight'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(tiny_gguf: Callable[..., Path], case: str) -> None:
    error, arguments, message = REFUSED[case]
    path = tiny_gguf("llama", **arguments)
    with pytest.raises(error, match=message) as caught:
        config_of(path)
    assert str(path) in str(caught.value)


def test_a_window_pattern_of_another_length_is_refused(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("gemma3", change={"gemma3.attention.sliding_window_pattern": [True] * 60})
    with pytest.raises(
        ModelConfigError, match=r"sliding_window_pattern must be a list of 2, got \[True, True, .*\.\.\."
    ):
        config_of(path)


def test_an_unknown_architecture_is_refused(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(tmp_path / "x.gguf", "mamba", {}, {})
    with pytest.raises(UnsupportedModelError, match="of architecture 'mamba'; Cardan reads llama, granite"):
        config_of(path)


def test_a_file_without_an_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + b"\0" * 16)
    with pytest.raises(ModelConfigError, match=r"general.architecture must be a name, got None"):
        config_of(path)
