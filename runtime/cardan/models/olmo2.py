"""OLMo 2.

It knows no array and no platform.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cardan.models.fields import ConfigFields
from cardan.models.spec import (
    ACTIVATION_NAMES,
    POST_NORMS,
    DecoderSizes,
    DecoderSpec,
    QKNorm,
    rope_reader,
    uniform_layers,
)


def olmo2(config: Mapping[str, Any]) -> DecoderSpec:
    """Norms stand after each block, and queries and keys are normalized over all heads together."""
    fields = ConfigFields(config)
    sizes = DecoderSizes.read(fields)
    attention_bias = fields.boolean("attention_bias", False)
    return DecoderSpec(
        family="olmo2",
        sizes=sizes,
        layers=uniform_layers(sizes),
        ropes=(rope_reader(fields, sizes).read(),),
        norms=POST_NORMS,
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        qk_norm=QKNorm.WIDTH,
        activation=fields.choice("hidden_act", ACTIVATION_NAMES, "silu"),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        attention_scale=sizes.head_dim**-0.5,
        tied=fields.optional_boolean("tie_word_embeddings"),
    )
