"""A model's own sampling defaults: what its ``generation_config.json`` says where a request says nothing.

It knows no request under way; the plan carries what it finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from cardan.engine.api import GenerateRequest
from cardan.engine.native import sampling_from_dict
from cardan.engine.validation import UNSUPPORTED, RequestLimits, check_request, lacking_features
from cardan.errors import ModelConfigError, RequestError, UnsupportedError
from cardan.platform import Capabilities, Plan, SettingSource

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of ``SamplingParams`` that a model's ``generation_config.json`` gives a default for."""


def with_sampling_defaults(
    plan: Plan,
    asked: Literal["model", "openai"],
    generation_config: Mapping[str, Any],
    capabilities: Capabilities,
) -> Plan:
    """A plan with ``sampling_defaults``: a dict of fields and values, or None where there are none.

    Args:
        plan: resolved but for this.
        asked: ``--sampling-defaults``.
        generation_config: the model's.
        capabilities: of the platform, which must be able to do what the defaults ask of every request.

    Raises:
        ModelConfigError: a default is out of range or of the wrong type.
        UnsupportedError: the platform lacks what a default needs.
    """
    if asked == "openai":
        return plan.with_setting("sampling_defaults", None, SettingSource.FLAG, "--sampling-defaults openai")
    found = {name: generation_config[name] for name in FIELDS if generation_config.get(name) is not None}
    if found.get("top_k") == 0:  # how such files write the whole vocabulary
        found["top_k"] = -1
    if not found:
        why = "the model's files name none: temperature 1.0, no filter, no penalty"
        return plan.with_setting("sampling_defaults", None, SettingSource.MODEL, why)
    limits = RequestLimits(
        vocab_size=plan.model.vocab_size, platform=plan.platform, lacking=lacking_features(capabilities)
    )
    try:
        asking = sampling_from_dict(found, {"temperature": 0.0})
        check_request(GenerateRequest(input_ids=(0,), sampling=asking), limits)
    except RequestError as error:
        kind = UnsupportedError if error.code == UNSUPPORTED else ModelConfigError
        raise kind(
            f"The generation_config.json of model {plan.model.name!r} gives sampling defaults that cannot be used: "
            f"{error} Correct the file, or pass --sampling-defaults openai."
        ) from error
    why = "generation_config.json, for what a request does not state"
    return plan.with_setting("sampling_defaults", found, SettingSource.MODEL, why)
