"""Tiny random checkpoints of every family, made with transformers' own classes; any test folder may import this.

``make_tiny("llama", folder)`` writes ``config.json`` and ``model.safetensors`` (float32) and returns the folder.
They have no tokenizer; ids are below ``VOCAB``. It knows nothing of Cardan.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 97
CONTEXT = 64

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"rms_norm_eps": 1e-5}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "num_hidden_layers": 3},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "num_hidden_layers": 7},
    ),
    "gemma3_wrapped": (
        "Gemma3ForConditionalGeneration",
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    ),
    "phi3": ("Phi3ForCausalLM", {"original_max_position_embeddings": CONTEXT}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
}
"""Architecture and the settings that make it interesting, by family."""


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


LLAMA3_ROPE = _rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
SHORT_FACTORS = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5]
LONG_FACTORS = [1.0, 1.5, 2.5, 4.0, 6.0, 8.0]
LONGROPE = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "mha": {"num_key_value_heads": 4},
        "mqa": {"num_key_value_heads": 1},
        "gqa3": {"num_attention_heads": 6, "num_key_value_heads": 2},
        "tied": {"tie_word_embeddings": True},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "head_dim": {"head_dim": 20},
        "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        "linear": _rope("linear", factor=2.5),
        "dynamic": _rope("dynamic", factor=2.0),
        "llama3": LLAMA3_ROPE,
        "yarn": _rope("yarn", **YARN),
        "yarn_mscale": _rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.7),
        "yarn_attention_factor": _rope("yarn", **YARN, attention_factor=1.3, beta_fast=8.0, beta_slow=2.0),
        "yarn_no_truncate": _rope("yarn", **YARN, truncate=False),
        "gelu": {"hidden_act": "gelu"},
    },
    "mistral": {
        "window": {"sliding_window": 5},
        "head_dim": {"head_dim": 16, "sliding_window": 1},
    },
    "qwen2": {
        "tied": {"tie_word_embeddings": True},
        "window": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        "yarn": _rope("yarn", **YARN),
    },
    "qwen3": {
        "tied": {"tie_word_embeddings": True},
        "attention_bias": {"attention_bias": True},
        "window": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        "mqa": {"num_key_value_heads": 1},
    },
    "gemma2": {
        "no_softcaps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        "hard_softcaps": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
        "attention_bias": {"attention_bias": True},
        "untied": {"tie_word_embeddings": False},
    },
    "gemma3": {
        "linear": {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
        },
        "softcap": {"final_logit_softcapping": 1.0},
        "layer_types": {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    },
    "phi3": {
        "window": {"sliding_window": 7},
        "partial": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "longrope_short": {"original_max_position_embeddings": 48, **_rope("longrope", **LONGROPE)},
        "longrope_long": {"original_max_position_embeddings": 16, **_rope("longrope", **LONGROPE)},
        "longrope_partial": {
            "original_max_position_embeddings": 16,
            **_rope("longrope", short_factor=[1.0, 1.5, 2.0], long_factor=[1.0, 2.0, 4.0], partial_rotary_factor=0.5),
        },
        "tied": {"tie_word_embeddings": True},
    },
    "olmo2": {
        "mha": {"num_key_value_heads": 4},
        "attention_bias": {"attention_bias": True},
    },
    "granite": {
        "tied": {"tie_word_embeddings": True},
        "biases": {"attention_bias": True, "mlp_bias": True},
    },
}
"""Settings on top of the family's, by family and variant."""

ALL_MODELS = [(family, variant) for family in FAMILIES for variant in (None, *VARIANTS.get(family, {}))]


def make_tiny(family: str, folder: Path, variant: str | None = None, seed: int = 0, context: int = CONTEXT) -> Path:
    """Write a checkpoint of random float32 weights, every norm and bias included, and return its folder."""
    import torch
    import transformers

    architecture, settings = FAMILIES[family]
    model_class = getattr(transformers, architecture)
    config_class = model_class.config_class
    changed = VARIANTS[family][variant] if variant else {}
    values = json.loads(json.dumps({**SIZES, "max_position_embeddings": context, **settings, **changed}))
    if family == "gemma3_wrapped":
        values = {"text_config": values, "vision_config": _tiny_vision(), "mm_tokens_per_image": 4}
    config = config_class(**values, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    norm_centre = 0.0 if family.startswith("gemma") else 1.0
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(_random_values(name, tuple(parameter.shape), norm_centre, generator))
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


def _random_values(name: str, shape: tuple[int, ...], norm_centre: float, generator: Any) -> Any:
    """Matrices that keep activations near 1 in size; norms scattered around their centre, biases around 0."""
    import torch

    values = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 0.3 * values + (norm_centre if "norm" in name else 0.0)
    return values * (0.5 if "embed_tokens" in name else 1.5 / shape[-1] ** 0.5)


def _tiny_vision() -> dict[str, Any]:
    return {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }


def transformers_logits(folder: Path, ids: list[int]) -> Any:
    """What transformers computes for one sequence in float32; numpy ``[len(ids), vocab]``."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].numpy()
