"""Granite 3 (dense).

It knows no array and no platform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cardan.models.fields import ConfigFields
from cardan.models.llama import llama
from cardan.models.spec import DecoderSpec


def granite(config: Mapping[str, Any]) -> DecoderSpec:
    """Llama with factors on embeddings, scores, residuals and logits."""
    fields = ConfigFields(config)
    return replace(
        llama(config),
        family="granite",
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        scales_given_embeds=True,
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )
