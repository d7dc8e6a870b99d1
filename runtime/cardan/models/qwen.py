"""Qwen2, Qwen2.5 and Qwen3 (dense).

It knows no array and no platform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cardan.models.fields import ConfigFields
from cardan.models.spec import (
    ACTIVATION_NAMES,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    QKNorm,
    alternating_layers,
    rope_reader,
    uniform_layers,
)


def qwen2(config: Mapping[str, Any]) -> DecoderSpec:
    """Llama's layout with a bias on queries, keys and values."""
    fields = ConfigFields(config)
    sizes = DecoderSizes.read(fields)
    return DecoderSpec(
        family="qwen2",
        sizes=sizes,
        layers=_layers(fields, sizes),
        ropes=(rope_reader(fields, sizes).read(),),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.choice("hidden_act", ACTIVATION_NAMES, "silu"),
        qkv_bias=True,
        attention_scale=sizes.head_dim**-0.5,
        tied=fields.optional_boolean("tie_word_embeddings"),
    )


def qwen3(config: Mapping[str, Any]) -> DecoderSpec:
    """Qwen2 with each head of queries and keys normalized, instead of the bias."""
    fields = ConfigFields(config)
    attention_bias = fields.boolean("attention_bias", False)
    spec = qwen2({**config, "head_dim": fields.integer("head_dim", 128)})
    return replace(spec, family="qwen3", qk_norm=QKNorm.HEAD, qkv_bias=attention_bias, o_bias=attention_bias)


def _layers(fields: ConfigFields, sizes: DecoderSizes) -> tuple[LayerSpec, ...]:
    """Windows only where ``use_sliding_window`` asks for them, from layer ``max_window_layers`` on."""
    if not fields.boolean("use_sliding_window", False):
        return uniform_layers(sizes)
    first = fields.integer("max_window_layers", sizes.layers, minimum=0)
    return alternating_layers(fields, sizes, lambda index: index >= first)
