"""Checks of what is asked for against what a platform offers; each refusal says what would work.

It decides no default (``cardan.platform.resolve`` does) and knows no platform by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from cardan.errors import ConfigError, UnsupportedError
from cardan.platform.api import OptionSpec
from cardan.platform.capabilities import Capabilities, Feature, Support
from cardan.platform.model import ModelFacts
from cardan.platform.plan import FormatPlan, Setting, SettingSource
from cardan.types import KVKind, LayerKV

DENSE_FORMATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Formats that every platform takes: the last linear method of each converts them to the activations' type."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def refuse_choice(flag: str, got: str, family: str, platform: str, capabilities: Capabilities) -> NoReturn:
    """Refuse a value that is not among those that a family of features has.

    Raises:
        UnsupportedError: always, with the known values, the platform's reason and a flag that works.
    """
    known = capabilities.family(family)
    answer = capabilities.features.get(f"{family}:{got}")
    reason = f" ({answer.reason})" if answer is not None and answer.reason else ""
    alternative = answer.alternative.rstrip(".") if answer is not None else ""
    if not known:
        advice = alternative or "Drop the flag"
        raise UnsupportedError(f"{flag} has no choices on platform {platform!r}, got {got!r}{reason}. {advice}.")
    option = flag if flag.startswith("--") else "--" + flag.rsplit(maxsplit=1)[-1].replace("_", "-")
    raise UnsupportedError(
        f"{flag} must be one of {', '.join(known)} on platform {platform!r}, got {got!r}{reason}. "
        f"{alternative or f'Pass {option} {known[0]}'}."
    )


def check_ranks(tp_size: int, platform: str, capabilities: Capabilities) -> None:
    """Refuse tensor parallelism.

    Raises:
        UnsupportedError: ``tp_size`` is above 1.
    """
    if tp_size == 1:
        return
    answer = capabilities.get(Feature.TENSOR_PARALLEL)
    reason = answer.reason if answer.support is Support.UNSUPPORTED else "the engine runs one rank"
    raise UnsupportedError(
        f"--tp-size must be 1 on platform {platform!r}, got {tp_size}: {reason}. Pass --tp-size 1, and choose a "
        "model or a quantized checkpoint that fits one device."
    )


def check_layers(layers: Sequence[LayerKV], context_length: int, platform: str, capabilities: Capabilities) -> None:
    """Refuse a model whose layers need what the platform's attention lacks.

    Raises:
        UnsupportedError: naming the feature, the layers and the platform's reason.
    """
    for feature, indices in _needed_features(layers, context_length).items():
        if capabilities.supports(feature):
            continue
        answer = capabilities.get(feature)
        advice = answer.alternative.rstrip(".") or "Choose another platform; `cardan platforms` lists them"
        named = ", ".join(str(index) for index in indices[:4]) + (" …" if len(indices) > 4 else "")
        raise UnsupportedError(
            f"The model needs {feature} in layers {named}, which platform {platform!r} does not support: "
            f"{answer.reason}. {advice}."
        )


def _needed_features(layers: Sequence[LayerKV], context_length: int) -> dict[str, list[int]]:
    needed: dict[str, list[int]] = {}
    for layer in layers:
        features = []
        if layer.window is not None and layer.window < context_length:
            features.append(str(Feature.SLIDING_WINDOW))
        if layer.softcap is not None:
            features.append(str(Feature.ATTENTION_SOFTCAP))
        if layer.sinks:
            features.append(str(Feature.ATTENTION_SINKS))
        if layer.kind in (KVKind.LATENT, KVKind.STATE):
            features.append(f"kv_kind:{layer.kind}")
        for feature in features:
            needed.setdefault(feature, []).append(layer.index)
    return needed


def check_chunk(chunk: int, page: int) -> None:
    """Refuse chunks that are smaller than a page, since a chunk ends at a page's end.

    Raises:
        ConfigError: the chunk is smaller than a page.
    """
    if chunk != -1 and chunk < page:
        raise ConfigError(
            f"--chunked-prefill-size must be at least the page size of {page}, got {chunk}. "
            f"Pass --chunked-prefill-size {page} or more, or a smaller --page-size."
        )


def plan_formats(
    facts: ModelFacts, capabilities: Capabilities, elsewhere: Mapping[str, tuple[str, ...]], *, refuse: bool
) -> tuple[FormatPlan, ...]:
    """What happens to the weights of each format of the checkpoint.

    Args:
        facts: the model's formats.
        capabilities: answers ``weights:FORMAT``.
        elsewhere: for a format, other platforms that take it.
        refuse: whether widening is refused.

    Raises:
        UnsupportedError: a format would be widened and that is refused.
    """
    plans = tuple(_plan_format(fmt, count, capabilities) for fmt, count in sorted(facts.weight_formats.items()))
    widened = [plan for plan in plans if not plan.native]
    if widened and refuse:
        described = "; ".join(
            f"{plan.fmt} ({plan.tensors} tensors; taken by {', '.join(elsewhere.get(plan.fmt, ())) or 'no other'})"
            for plan in widened
        )
        raise UnsupportedError(
            f"No GEMM of the platform takes these weight formats of {facts.name!r}, and --quantization-fallback "
            f"refuse forbids to widen them: {described}. Pass --quantization-fallback auto to widen them at load, "
            "or --platform with one that takes them."
        )
    return plans


def _plan_format(fmt: str, count: int, capabilities: Capabilities) -> FormatPlan:
    answer = capabilities.get(f"weights:{fmt}")
    if answer.support is Support.NATIVE:
        return FormatPlan(fmt, count, True, answer.reason or "taken as it is")
    if fmt in DENSE_FORMATS:
        return FormatPlan(fmt, count, True, "dense; converted to the type of the activations")
    return FormatPlan(fmt, count, False, f"widened at load: {answer.reason}")


def resolve_quantization(asked: str | None, facts: ModelFacts, capabilities: Capabilities) -> Setting:
    """The format that weights are quantized to at load, or the one that the checkpoint was asked to be in.

    Raises:
        UnsupportedError: the checkpoint is in another format, and the platform does not make this one.
    """
    if asked is None:
        return Setting(None, SettingSource.DEFAULT, "weights keep the checkpoint's formats")
    main = main_format(facts.weight_formats)
    if asked.lower() == main.lower():
        return Setting(main, SettingSource.FLAG, "--quantization; the checkpoint is in it")
    made = {fmt.lower(): fmt for fmt in capabilities.family("quantize")}
    if asked.lower() in made:
        return Setting(made[asked.lower()], SettingSource.FLAG, "--quantization; made at load")
    offer = f"or one that the platform makes at load ({', '.join(made.values())})" if made else ""
    why = offer or "since nothing is quantized at load"
    raise UnsupportedError(
        f"--quantization must name the format that the checkpoint {facts.name!r} is in ({main}), {why}, "
        f"got {asked!r}. Drop the flag, or choose a checkpoint in that format."
    )


def main_format(formats: Mapping[str, int]) -> str:
    """The format of most weights: of most block-quantized tensors where there are any (norms stay dense)."""
    blocks = {fmt: count for fmt, count in formats.items() if fmt not in DENSE_FORMATS}
    counted = blocks or formats
    return max(sorted(counted), key=lambda fmt: counted[fmt], default="none")


def parse_options(given: Iterable[str], specs: Iterable[OptionSpec], platform: str) -> dict[str, Any]:
    """Values of a platform's own options: the defaults, and what was given as ``name=value``.

    Raises:
        ConfigError: an option is unknown, given twice, malformed, of the wrong kind or not among its choices.
    """
    known = {spec.name: spec for spec in specs}
    values = {name: spec.default for name, spec in known.items()}
    seen: set[str] = set()
    for text in given:
        name, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--platform-option must be name=value, got {text!r}. Write --platform-option {text}=….")
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise ConfigError(
                f"--platform-option {name!r} is unknown on platform {platform!r}; known: {listed}. "
                "`cardan platforms` describes them."
            )
        if name in seen:
            raise ConfigError(f"--platform-option {name!r} was given twice. Give it once.")
        seen.add(name)
        values[name] = _parse_option(known[name], value)
    return values


def _parse_option(spec: OptionSpec, text: str) -> Any:
    try:
        value = _parse_bool(text) if spec.kind is bool else spec.kind(text)
    except ValueError:
        raise ConfigError(
            f"--platform-option {spec.name} must be of type {spec.kind.__name__}, got {text!r}. "
            f"The default is {spec.default!r}."
        ) from None
    if spec.choices and value not in spec.choices:
        raise ConfigError(
            f"--platform-option {spec.name} must be one of {', '.join(str(choice) for choice in spec.choices)}, "
            f"got {text!r}. The default is {spec.default!r}."
        )
    return value


def _parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(text)
