"""Gemma 2 and Gemma 3 (text).

It knows no array and no platform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cardan.models.fields import ConfigFields
from cardan.models.spec import (
    ACTIVATION_NAMES,
    FULL,
    SANDWICH_NORMS,
    SLIDING,
    DecoderSizes,
    DecoderSpec,
    QKNorm,
    alternating_layers,
    rope_reader,
)

GEMMA3_LOCAL_ROPE = 1
GEMMA2_DEFAULTS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}
GEMMA3_TEXT_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
"""What published ``text_config`` groups leave out."""
WRAPPED_PREFIXES = ("language_model.model.", "model.language_model.", "model.")
WRAPPED_HEADS = ("language_model.lm_head.weight", "lm_head.weight")


def gemma2(config: Mapping[str, Any]) -> DecoderSpec:
    """Every other layer has a window; scores and logits have soft caps."""
    return _gemma({**GEMMA2_DEFAULTS, **config})


def _gemma(config: Mapping[str, Any]) -> DecoderSpec:
    """Norms before and after each block, a GELU gate, embeddings scaled by the root of their width."""
    fields = ConfigFields(config)
    sizes = DecoderSizes.read(fields, head_dim=256)
    attention_bias = fields.boolean("attention_bias", False)
    fields.must_be("use_bidirectional_attention", False, "decoding is causal")
    activation = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    return DecoderSpec(
        family="gemma2",
        sizes=sizes,
        layers=alternating_layers(fields, sizes, lambda index: index % 2 == 0),
        ropes=(rope_reader(fields, sizes).read(),),
        norms=SANDWICH_NORMS,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_offset=fields.number("cardan_norm_offset", 1.0, above=-1.0),
        activation=fields.choice(activation, ACTIVATION_NAMES, "gelu_pytorch_tanh"),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        embedding_scale=sizes.hidden**0.5,
        tied=fields.boolean("tie_word_embeddings", True),
    )


def gemma3(config: Mapping[str, Any]) -> DecoderSpec:
    """Queries and keys are normalized; five windowed layers to a full one, with a RoPE for each kind."""
    config = {"sliding_window": 4096, **config}
    fields = ConfigFields(config)
    fields.must_be("attn_logit_softcapping", None, "Gemma 3 has no soft cap on scores")
    spec = _gemma(config)
    ropes = rope_reader(fields, spec.sizes)
    period = fields.integer("sliding_window_pattern", 6)
    return replace(
        spec,
        family="gemma3",
        layers=alternating_layers(
            fields, spec.sizes, lambda index: (index + 1) % period != 0, local_rope_id=GEMMA3_LOCAL_ROPE
        ),
        ropes=(
            ropes.read(FULL, theta=1e6),
            ropes.read(SLIDING, theta=1e4, theta_key="rope_local_base_freq", scaled=False),
        ),
        qk_norm=QKNorm.HEAD,
    )


def gemma3_wrapped(config: Mapping[str, Any]) -> DecoderSpec:
    """The language model of a checkpoint that has a vision tower as well.

    Raises:
        ModelConfigError: there is no ``text_config``.
    """
    fields = ConfigFields(config)
    if fields.fields("text_config") is None:
        fields.refuse("text_config", "an object with the language model's config")
    outer = {key: config[key] for key in ("tie_word_embeddings", "cardan_norm_offset") if key in config}
    spec = gemma3({**GEMMA3_TEXT_DEFAULTS, **outer, **config["text_config"]})
    return replace(spec, prefixes=WRAPPED_PREFIXES, head_names=WRAPPED_HEADS)
