"""Which architectures there are, and how a config and the names of a checkpoint's tensors become a model.

It knows no platform and reads no data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from cardan.errors import ConfigError, ModelConfigError, UnsupportedModelError
from cardan.models.decoder import DecoderModel
from cardan.models.fields import ConfigFields
from cardan.models.gemma import gemma2, gemma3, gemma3_wrapped
from cardan.models.granite import granite
from cardan.models.llama import llama, mistral
from cardan.models.olmo2 import olmo2
from cardan.models.parameters import TensorInfo
from cardan.models.phi3 import phi3
from cardan.models.qwen import qwen2, qwen3
from cardan.models.spec import DecoderSpec, kv_scales
from cardan.platform import Model

ModelBuilder: TypeAlias = Callable[[Mapping[str, Any], str, TensorInfo | None], Model]
"""Makes a model of ``(config, name, tensors)``, or raises a ``ModelError``."""


def _decoder(describe: Callable[[Mapping[str, Any]], DecoderSpec]) -> ModelBuilder:
    def build(config: Mapping[str, Any], name: str, tensors: TensorInfo | None) -> Model:
        spec = describe(config)
        scaled = replace(spec, kv_scales=kv_scales(ConfigFields(config), spec.sizes))
        return DecoderModel(scaled, config, name, tensors)

    return build


MODEL_FAMILIES: dict[str, ModelBuilder] = {
    "LlamaForCausalLM": _decoder(llama),
    "MistralForCausalLM": _decoder(mistral),
    "Qwen2ForCausalLM": _decoder(qwen2),
    "Qwen3ForCausalLM": _decoder(qwen3),
    "Gemma2ForCausalLM": _decoder(gemma2),
    "Gemma3ForCausalLM": _decoder(gemma3),
    "Gemma3ForConditionalGeneration": _decoder(gemma3_wrapped),
    "Phi3ForCausalLM": _decoder(phi3),
    "Olmo2ForCausalLM": _decoder(olmo2),
    "GraniteForCausalLM": _decoder(granite),
}
"""Builders by architecture, as ``architectures`` of a config names it."""


def register_model(architecture: str, builder: ModelBuilder) -> None:
    """Add an architecture.

    Raises:
        ConfigError: there is a builder for it already.
    """
    if architecture in MODEL_FAMILIES:
        raise ConfigError(
            f"A plugin registers the model architecture {architecture}, which is registered already. "
            f"Expected a new name; remove one of the two plugins, or the registration."
        )
    MODEL_FAMILIES[architecture] = builder


def build_model(config: Mapping[str, Any], name: str, tensors: TensorInfo | None) -> Model:
    """The model that a config describes, checked against the checkpoint's tensors.

    Args:
        config: keys of a Hugging Face ``config.json``.
        name: what the user called the model.
        tensors: format and shape of each tensor by Hugging Face name; None when there is no checkpoint yet.

    Raises:
        UnsupportedModelError: no implementation for its architecture.
        ModelConfigError: a field of the config is missing or contradicts another.
        CheckpointError: a tensor is missing or has another shape.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list | tuple) or not architectures:
        raise ModelConfigError(
            f"The config of {name} has architectures = {architectures!r}, expected a list such as "
            f'["LlamaForCausalLM"]. Add it to config.json.'
        )
    for architecture in architectures:
        if architecture in MODEL_FAMILIES:
            return MODEL_FAMILIES[architecture](config, name, tensors)
    raise UnsupportedModelError(
        f"{name} has the architecture {', '.join(map(str, architectures))}, which is not implemented; expected one of "
        f"{', '.join(sorted(MODEL_FAMILIES))}. Choose another model, or install a plugin that registers this one."
    )
