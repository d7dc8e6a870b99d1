"""Phi-3, Phi-3.5 and Phi-4-mini.

It knows no array and no platform.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cardan.models.fields import ConfigFields
from cardan.models.spec import ACTIVATION_NAMES, DecoderSizes, DecoderSpec, rope_reader, uniform_layers


def phi3(config: Mapping[str, Any]) -> DecoderSpec:
    """Llama's layout with fused tensors; LongRoPE, and in Phi-4-mini only a part of each head is rotated."""
    fields = ConfigFields(config)
    sizes = DecoderSizes.read(fields)
    return DecoderSpec(
        family="phi3",
        sizes=sizes,
        layers=uniform_layers(sizes, fields.optional_integer("sliding_window")),
        ropes=(rope_reader(fields, sizes).read(),),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        activation=fields.choice("hidden_act", ACTIVATION_NAMES, "silu"),
        fused_tensors=True,
        attention_scale=sizes.head_dim**-0.5,
        tied=fields.optional_boolean("tie_word_embeddings"),
    )
