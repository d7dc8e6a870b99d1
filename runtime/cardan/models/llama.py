"""Llama: Llama 2 and 3, SmolLM2, TinyLlama; and Mistral, which is Llama with a window on every layer.

It knows no array and no platform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cardan.models.fields import ConfigFields
from cardan.models.spec import ACTIVATION_NAMES, DecoderSizes, DecoderSpec, rope_reader, uniform_layers


def llama(config: Mapping[str, Any]) -> DecoderSpec:
    """Pre-norm decoder with grouped-query attention, RoPE and a SiLU-gated feed-forward block."""
    fields = ConfigFields(config)
    sizes = DecoderSizes.read(fields)
    attention_bias = fields.boolean("attention_bias", False)
    return DecoderSpec(
        family="llama",
        sizes=sizes,
        layers=uniform_layers(sizes),
        ropes=(rope_reader(fields, sizes).read(),),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.choice("hidden_act", ACTIVATION_NAMES, "silu"),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        attention_scale=sizes.head_dim**-0.5,
        tied=fields.optional_boolean("tie_word_embeddings"),
    )


def mistral(config: Mapping[str, Any]) -> DecoderSpec:
    """Llama with a sliding window: 4096 where the config does not say, none where it says null."""
    spec = llama(config)
    window = ConfigFields({"sliding_window": 4096, **config}).optional_integer("sliding_window")
    return replace(spec, family="mistral", layers=uniform_layers(spec.sizes, window))
