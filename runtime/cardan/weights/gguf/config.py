"""The metadata of a GGUF file as a config with Hugging Face's keys.

It knows what the published converters write, and nothing of how models run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from cardan.errors import CheckpointError, UnsupportedModelError
from cardan.weights.gguf.header import GgufHeader
from cardan.weights.gguf.metadata import Metadata
from cardan.weights.gguf.names import ARCHITECTURES
from cardan.weights.gguf.rope import RopeFactors, rope_config

Config: TypeAlias = dict[str, Any]


def architecture_of(header: GgufHeader) -> str:
    """The architecture of a file.

    Raises:
        ModelConfigError: the file names none.
        UnsupportedModelError: Cardan reads no files of it.
    """
    architecture = Metadata(header.path, header.metadata).architecture
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.path} is a GGUF file of architecture {architecture!r}; Cardan reads "
            f"{', '.join(ARCHITECTURES)}. If the model has safetensors, use those."
        )
    return architecture


def gguf_config(header: GgufHeader, factors: RopeFactors) -> Config:
    """The config of a file; ``factors`` holds its tensors of rotary factors by name.

    Two keys are Cardan's own: ``cardan_norm_offset`` (0.0: Gemma's "1 +" is already in the norm weights) and
    ``cardan_rope_factors`` (each rotary frequency is divided by its factor, instead of any ``rope_scaling``).

    Raises:
        CheckpointError: the file has no weights.
        ModelConfigError: a key is missing, of another type, or contradicts the tensors.
        UnsupportedModelError: Cardan does not run such a model.
    """
    architecture = architecture_of(header)
    meta = Metadata(header.path, header.metadata)
    _refuse_parts_and_experts(header, meta)
    config = _common(header, meta)
    config.update(rope_config(meta, factors, config))
    _FAMILIES[architecture](header, meta, config)
    return config


def _refuse_parts_and_experts(header: GgufHeader, meta: Metadata) -> None:
    parts = meta.raw("split.count")
    if isinstance(parts, int) and parts > 1:
        raise CheckpointError(
            f"{header.path} is one of {parts} parts of a split GGUF file. Merge them first: "
            "llama-gguf-split --merge FIRST_PART MERGED."
        )
    experts = meta.raw(f"{meta.architecture}.expert_count")
    if isinstance(experts, int) and experts > 1:
        raise UnsupportedModelError(
            f"{header.path} is a mixture of {experts} experts, which Cardan does not read from GGUF."
        )


def _common(header: GgufHeader, meta: Metadata) -> Config:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"{header.path} has no matrix token_embd.weight among its {len(header.tensors)} tensors: it holds a "
            "vocabulary or a part of a model. Fetch the model itself."
        )
    num_layers = meta.positive("block_count")
    if num_layers > len(header.tensors):
        raise CheckpointError(
            f"{header.path} announces {num_layers} layers, but has {len(header.tensors)} tensors. "
            "The file is damaged or incomplete; fetch it again."
        )
    num_heads = meta.positive("attention.head_count")
    hidden_size = meta.positive("embedding_length")
    config: Config = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": meta.positive("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta.positive("attention.head_count_kv", num_heads),
        "head_dim": _head_dim(header, meta, hidden_size, num_heads),
        "max_position_embeddings": meta.positive("context_length"),
        "rms_norm_eps": meta.above_zero("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.above_zero("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    rotary_dim = meta.positive("rope.dimension_count", config["head_dim"])
    if rotary_dim != config["head_dim"]:
        config["partial_rotary_factor"] = rotary_dim / config["head_dim"]
    for name in ("bos", "eos", "pad"):
        token = meta.raw(f"{_TOKENIZER[name]}_token_id")
        if isinstance(token, int) and not isinstance(token, bool):
            config[f"{name}_token_id"] = token
    return config


_TOKENIZER = {"bos": "tokenizer.ggml.bos", "eos": "tokenizer.ggml.eos", "pad": "tokenizer.ggml.padding"}


def _head_dim(header: GgufHeader, meta: Metadata, hidden_size: int, num_heads: int) -> int:
    if not meta.has("attention.key_length") and hidden_size % num_heads:
        raise CheckpointError(
            f"{header.path}: an embedding of {hidden_size} does not divide among {num_heads} heads, and "
            f"{meta.architecture}.attention.key_length is missing. The file contradicts itself; fetch it again."
        )
    head_dim = meta.positive("attention.key_length", max(hidden_size // num_heads, 1))
    value_dim = meta.positive("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UnsupportedModelError(
            f"{header.path}: keys of {head_dim} and values of {value_dim} features per head are not supported "
            f"for {meta.architecture}."
        )
    if head_dim % 2:
        raise CheckpointError(
            f"{header.path}: heads of {head_dim} features cannot be rotated in pairs. "
            "The file is damaged; fetch it again."
        )
    return head_dim


def _name(config: Config, architecture: str, model_type: str) -> None:
    config["architectures"] = [architecture]
    config["model_type"] = model_type


def _biases(header: GgufHeader, config: Config) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors


def _layer_types(meta: Metadata, config: Config, period: int) -> None:
    """Every ``period``-th layer sees all, the others a window, unless the file says it layer by layer."""
    count = config["num_hidden_layers"]
    sliding = meta.flags("attention.sliding_window_pattern", count)
    if sliding is None:
        period = meta.positive("attention.sliding_window_pattern", period)
        sliding = [(layer + 1) % period != 0 for layer in range(count)]
    config["sliding_window"] = meta.positive("attention.sliding_window")
    config["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in sliding]


def _llama(header: GgufHeader, meta: Metadata, config: Config) -> None:
    _biases(header, config)
    _name(config, "LlamaForCausalLM", "llama")
    if meta.has("attention.sliding_window"):
        _name(config, "MistralForCausalLM", "mistral")
        config["sliding_window"] = meta.positive("attention.sliding_window")


def _granite(header: GgufHeader, meta: Metadata, config: Config) -> None:
    _biases(header, config)
    _name(config, "GraniteForCausalLM", "granite")
    config["embedding_multiplier"] = meta.number("embedding_scale", 1.0)
    config["residual_multiplier"] = meta.number("residual_scale", 1.0)
    config["logits_scaling"] = meta.number("logit_scale", 1.0)
    config["attention_multiplier"] = meta.number("attention.scale", config["head_dim"] ** -0.5)


def _qwen2(_header: GgufHeader, _meta: Metadata, config: Config) -> None:
    _name(config, "Qwen2ForCausalLM", "qwen2")
    config["use_sliding_window"] = False


def _qwen3(header: GgufHeader, _meta: Metadata, config: Config) -> None:
    _name(config, "Qwen3ForCausalLM", "qwen3")
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["use_sliding_window"] = False


def _olmo2(_header: GgufHeader, meta: Metadata, config: Config) -> None:
    config["attention_bias"] = False
    _name(config, "Olmo2ForCausalLM", "olmo2")
    if meta.has("attention.sliding_window"):
        _name(config, "Olmo3ForCausalLM", "olmo3")
        _layer_types(meta, config, period=4)


def _phi3(_header: GgufHeader, meta: Metadata, config: Config) -> None:
    _name(config, "Phi3ForCausalLM", "phi3")
    config["original_max_position_embeddings"] = meta.positive(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    if meta.has("attention.sliding_window"):
        config["sliding_window"] = meta.positive("attention.sliding_window")


def _gemma(meta: Metadata, config: Config, largest: int) -> None:
    """What Gemma 2 and 3 share; the largest of each, told by its layers, divides queries by another width."""
    config["hidden_act"] = config["hidden_activation"] = "gelu_pytorch_tanh"
    config["cardan_norm_offset"] = 0.0
    config["attention_bias"] = False
    width = config["head_dim"]
    if config["num_hidden_layers"] == largest:
        width = config["hidden_size"] // config["num_attention_heads"]
    if meta.has("attention.scale"):
        config["query_pre_attn_scalar"] = meta.above_zero("attention.scale") ** -2
    else:
        config["query_pre_attn_scalar"] = width
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        config[key] = meta.number(key) if meta.has(key) else None


def _gemma2(_header: GgufHeader, meta: Metadata, config: Config) -> None:
    _name(config, "Gemma2ForCausalLM", "gemma2")
    _gemma(meta, config, largest=46)
    config["attn_logit_softcapping"] = meta.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = meta.number("final_logit_softcapping", 30.0)
    _layer_types(meta, config, period=2)


def _gemma3(_header: GgufHeader, meta: Metadata, config: Config) -> None:
    _name(config, "Gemma3ForCausalLM", "gemma3_text")
    _gemma(meta, config, largest=62)
    config["rope_local_base_freq"] = meta.above_zero("rope.freq_base_swa", 10000.0)
    _layer_types(meta, config, period=6)


_FAMILIES: Mapping[str, Callable[[GgufHeader, Metadata, Config], None]] = {
    "llama": _llama,
    "granite": _granite,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "olmo2": _olmo2,
    "phi3": _phi3,
}
