"""Configs of tiny models, one for each architecture that Cardan brings, made to show what is special about each.

It knows no weights. A plugin that registers a model adds a config here, and the suite tries its model too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCAB = 97
CONTEXT = 160

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_GEMMA: Mapping[str, Any] = {
    "head_dim": 16,
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def _config(architecture: str, model_type: str, **settings: Any) -> dict[str, Any]:
    return {**SIZES, "architectures": [architecture], "model_type": model_type, **settings}


TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _config("LlamaForCausalLM", "llama"),
    "MistralForCausalLM": _config("MistralForCausalLM", "mistral", sliding_window=13),
    "Qwen2ForCausalLM": _config("Qwen2ForCausalLM", "qwen2", tie_word_embeddings=True),
    "Qwen3ForCausalLM": _config("Qwen3ForCausalLM", "qwen3", head_dim=16),
    "Gemma2ForCausalLM": _config(
        "Gemma2ForCausalLM",
        "gemma2",
        **_GEMMA,
        num_hidden_layers=3,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    "Gemma3ForCausalLM": _config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        **_GEMMA,
        num_hidden_layers=7,
        sliding_window_pattern=6,
        rope_local_base_freq=10000.0,
        rope_theta=1000000.0,
    ),
    "Phi3ForCausalLM": _config(
        "Phi3ForCausalLM", "phi3", original_max_position_embeddings=CONTEXT, partial_rotary_factor=0.5
    ),
    "Olmo2ForCausalLM": _config("Olmo2ForCausalLM", "olmo2"),
    "GraniteForCausalLM": _config(
        "GraniteForCausalLM",
        "granite",
        embedding_multiplier=12.0,
        attention_multiplier=0.1,
        residual_multiplier=0.22,
        logits_scaling=8.0,
    ),
}
"""Config of a tiny model by architecture. ``vocab_size`` must stay ``VOCAB`` and sequences fit into ``CONTEXT``."""

WRAPPERS: Mapping[str, str] = {"Gemma3ForConditionalGeneration": "a wrapper around Gemma3ForCausalLM, which is tried"}
"""Architectures that need no config of their own, and why."""
