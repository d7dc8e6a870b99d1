"""No flag and no request field is accepted and ignored: it shows in the plan, or it is refused with what would work.

It knows no platform: every flag and field is tried with values that some platform may lack.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cardan.config import CacheConfig, EngineConfig, GrammarConfig, ModelConfig, PlatformConfig, SchedulerConfig
from cardan.engine.api import GenerateRequest
from cardan.engine.messages import FeatureAnswer
from cardan.engine.validation import REQUEST_FEATURES, RequestLimits, check_request
from cardan.errors import CardanError, RequestError
from cardan.grammar_spec import GrammarKind, GrammarSpec
from cardan.platform import Feature, SettingSource
from cardan.testing.conformance.check import Check, CheckError, NotApplicableError, expect
from cardan.testing.conformance.engine_run import tiny
from cardan.testing.conformance.subject import Subject
from cardan.types import DTYPE_BYTES, LogprobParams, SamplingParams

GROUPS: Mapping[str, type[Any]] = {
    "model": ModelConfig,
    "platform": PlatformConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "grammar": GrammarConfig,
}

ADVICE = re.compile(
    r"(?:^|[.;:!] )(?:Pass|Drop|Run|Choose|Lower|Raise|Remove|Write|Give|Use|Set|Add|Install|Convert|Load|Send|Ask)\b"
)
"""A sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class FlagProbe:
    """Values to try a flag with, and where they have to show.

    Attributes:
        values: given one after the other.
        setting: of the plan, or of several plans' settings.
        shows: what the setting is for a value; the value itself by default.
    """

    values: tuple[Any, ...]
    setting: tuple[str, ...]
    shows: Callable[[Any], Any] = lambda value: value


def _negated(value: bool) -> bool:
    return not value


FLAGS: Mapping[str, FlagProbe] = {
    "model.dtype": FlagProbe(("float32", "bfloat16", "float16"), ("dtype",)),
    "model.context_length": FlagProbe((64,), ("context_length",)),
    "model.quantization": FlagProbe(("F32", "Q4_1", "no-such-format"), ("quantization",)),
    "model.quantization_fallback": FlagProbe(("refuse",), ("quantization_fallback",)),
    "platform.attention_backend": FlagProbe(
        ("no-such-backend",), ("prefill_attention_backend", "decode_attention_backend")
    ),
    "platform.prefill_attention_backend": FlagProbe(("no-such-backend",), ("prefill_attention_backend",)),
    "platform.decode_attention_backend": FlagProbe(("no-such-backend",), ("decode_attention_backend",)),
    "platform.kv_cache_dtype": FlagProbe((*DTYPE_BYTES, "no-such-type"), ("kv_cache_dtype",)),
    "platform.disable_graph": FlagProbe((True,), ("graph",), _negated),
    "platform.tp_size": FlagProbe((2,), ("tp_size",)),
    "cache.mem_fraction_static": FlagProbe((0.37,), ("mem_fraction_static",)),
    "cache.max_total_tokens": FlagProbe((4096,), ("max_total_tokens",)),
    "cache.page_size": FlagProbe((1, 2, 3, 16, 64, 128), ("page_size",)),
    "cache.disable_radix_cache": FlagProbe((True,), ("radix_cache",), _negated),
    "cache.radix_eviction_policy": FlagProbe(("lfu",), ("radix_eviction_policy",)),
    "scheduler.schedule_policy": FlagProbe(("lpm",), ("schedule_policy",)),
    "scheduler.schedule_conservativeness": FlagProbe((0.7,), ("schedule_conservativeness",)),
    "scheduler.chunked_prefill_size": FlagProbe((256, -1), ("chunked_prefill_size",)),
    "scheduler.max_prefill_tokens": FlagProbe((777,), ("max_prefill_tokens",)),
    "scheduler.max_running_requests": FlagProbe((3,), ("max_running_requests",)),
    "scheduler.max_queued_requests": FlagProbe((5,), ("max_queued_requests",)),
    "scheduler.enable_mixed_chunk": FlagProbe((True,), ("enable_mixed_chunk",)),
    "scheduler.prefill_decode_interval": FlagProbe((2,), ("prefill_decode_interval",)),
    "scheduler.enable_priority_scheduling": FlagProbe((True,), ("enable_priority_scheduling",)),
    "scheduler.priority_scheduling_preemption_threshold": FlagProbe(
        (4,), ("priority_scheduling_preemption_threshold",)
    ),
    "scheduler.disable_overlap_schedule": FlagProbe((True,), ("overlap",), _negated),
    "scheduler.allow_auto_truncate": FlagProbe((True,), ("allow_auto_truncate",)),
    "scheduler.random_seed": FlagProbe((9,), ("random_seed",)),
}
"""Flags that a plan answers."""

BESIDE_THE_PLAN: Mapping[str, str] = {
    "model.model": "says which model",
    "model.tokenizer": "read by the tokenizer",
    "model.chat_template": "read by the tokenizer",
    "model.tool_call_parser": "read by the server",
    "model.reasoning_parser": "read by the server",
    "model.is_embedding": "read by the server",
    "model.embedding_pooling": "read by the server",
    "model.served_model_name": "read by the server",
    "model.revision": "read by the download",
    "model.sampling_defaults": "a setting of the plan that states values of request fields",
    "model.random_weights": "read where the checkpoint is opened",
    "grammar.grammar_backend": "a setting of the plan that the engine makes",
    "grammar.grammar_compile_timeout_s": "read by the compiler of grammars",
    "grammar.json_whitespace": "read by the compiler of grammars",
    "grammar.disable_jump_forward": "a setting of the plan that the engine makes",
    "scheduler.enable_return_hidden_states": "read where requests are admitted",
    "scheduler.enable_custom_logit_processor": "read where requests are admitted",
    "platform.platform": "says which platform",
    "platform.options": "tried by the check of the platform's own options",
}
"""Flags that no platform can lack: nothing of them reaches it."""

NEEDED: Mapping[str, dict[str, Any]] = {
    "scheduler.priority_scheduling_preemption_threshold": {"scheduler.enable_priority_scheduling": True}
}
"""Flags that make sense with another one only."""

_GRAMMAR = GrammarSpec(kind=GrammarKind.REGEX, text="a|b")

FIELDS: Mapping[str, tuple[Feature, dict[str, Any]]] = {
    "temperature": (Feature.SAMPLING, {"sampling": SamplingParams(temperature=0.7)}),
    "top_p": (Feature.SAMPLING, {"sampling": SamplingParams(top_p=0.5)}),
    "top_k": (Feature.SAMPLING, {"sampling": SamplingParams(top_k=7)}),
    "min_p": (Feature.SAMPLING, {"sampling": SamplingParams(min_p=0.2)}),
    "seed": (Feature.SAMPLING, {"sampling": SamplingParams(seed=3)}),
    "frequency_penalty": (Feature.PENALTIES, {"sampling": SamplingParams(temperature=0.0, frequency_penalty=0.5)}),
    "presence_penalty": (Feature.PENALTIES, {"sampling": SamplingParams(temperature=0.0, presence_penalty=0.5)}),
    "repetition_penalty": (Feature.PENALTIES, {"sampling": SamplingParams(temperature=0.0, repetition_penalty=1.2)}),
    "logit_bias": (Feature.LOGIT_BIAS, {"sampling": SamplingParams(temperature=0.0, logit_bias={3: 1.0})}),
    "min_new_tokens": (Feature.LOGIT_BIAS, {"sampling": SamplingParams(temperature=0.0, min_new_tokens=2)}),
    "output": (Feature.LOGPROBS, {"logprobs": LogprobParams(output=True)}),
    "top": (Feature.LOGPROBS, {"logprobs": LogprobParams(output=True, top=3)}),
    "token_ids": (Feature.LOGPROBS, {"logprobs": LogprobParams(output=True, token_ids=(1, 2))}),
    "prompt_start": (Feature.PROMPT_LOGPROBS, {"logprobs": LogprobParams(prompt_start=0)}),
    "grammar": (Feature.GRAMMAR_MASK, {"sampling": SamplingParams(temperature=0.0, grammar=_GRAMMAR)}),
}
"""Request fields that act on the device: the feature that each needs, and a request that uses it."""

BESIDE_THE_DEVICE: Mapping[str, str] = {
    "max_new_tokens": "the scheduler counts",
    "stop": "the stop checker reads text",
    "stop_regex": "the stop checker reads text",
    "stop_token_ids": "the scheduler compares ids",
    "ignore_eos": "the scheduler compares ids",
    "no_stop_trim": "the detokenizer trims",
    "skip_special_tokens": "the detokenizer skips",
    "shown_special_ids": "the detokenizer skips all others",
    "n": "the frontend sends as many requests",
}
"""Request fields that no platform can lack: they are honoured on the host."""


def refusal_checks(subject: Subject) -> Iterator[Check]:
    """One check for each flag and each request field."""
    for key in FLAGS:
        flag = "--" + key.partition(".")[2].replace("_", "-")
        yield _check(f"flag-{flag}", partial(_run_flag, key=key))
    yield _check("flag---platform-option", _run_platform_options)
    yield _check("what-layers-need-is-refused-where-it-is-missing", _run_layers)
    for field in FIELDS:
        yield _check(f"request-field-{field}", partial(_run_field, field=field))


def _check(name: str, run: Callable[[Subject], None]) -> Check:
    return Check(part="capabilities", name=name, run=run, needs_ops=False)


def _config(changes: Mapping[str, Any]) -> EngineConfig:
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for key, value in changes.items():
        group, _, name = key.partition(".")
        groups[group][name] = value
    return EngineConfig(**{group: GROUPS[group](**values) for group, values in groups.items()})


def _run_flag(subject: Subject, key: str) -> None:
    probe, facts = FLAGS[key], tiny(subject).model.facts
    offered = _offered(subject, key)
    for value in dict.fromkeys((*probe.values, *offered)):
        flag = "--" + key.partition(".")[2].replace("_", "-")
        changes = {**NEEDED.get(key, {}), key: value}
        try:
            plan = subject.plan(facts, _config(changes))
        except CardanError as error:
            expect(value not in offered, f"{flag} {value} is offered by the platform and refused: {error}")
            _hold_message(str(error), f"{flag} {value}")
            continue
        for name in probe.setting:
            setting = plan.settings.get(name)
            shown = None if setting is None else setting.value
            wanted = probe.shows(value)
            expect(
                setting is not None and shown == wanted and setting.source is SettingSource.FLAG,
                f"{flag} {value} was accepted, but {name} is {shown!r} in the plan, expected {wanted!r} from the flag",
            )


def _offered(subject: Subject, key: str) -> tuple[Any, ...]:
    """Values of a flag that the platform says it takes."""
    capabilities = subject.capabilities
    if key == "cache.page_size":
        return capabilities.page_sizes
    if key.endswith("attention_backend"):
        return capabilities.family("attention")
    if key == "platform.kv_cache_dtype":
        return capabilities.family("kv_dtype")
    if key == "model.dtype":
        return tuple(name for name in capabilities.family("dtype") if name in ("float32", "bfloat16", "float16"))
    return ()


def _hold_message(message: str, what: str) -> None:
    expect(len(message) > 20, f"{what} is refused without saying why: {message!r}")
    advised = ADVICE.search(message) is not None
    expect(advised, f"{what} is refused without a sentence that says what to do (Pass ..., Drop ...): {message}")


def _run_platform_options(subject: Subject) -> None:
    facts = tiny(subject).model.facts
    wrong = ["no-such-option=1", "no-value"]
    wrong += [f"{spec.name}=#" for spec in subject.platform.options() if spec.kind is not str]
    for text in wrong:
        try:
            subject.plan(facts, _config({"platform.options": (text,)}))
        except CardanError as error:
            expect(len(str(error)) > 20, f"--platform-option {text} is refused without saying why: {error}")
            continue
        raise CheckError(f"--platform-option {text} was accepted")
    for spec in subject.platform.options():
        given = _other_value(spec.kind, spec.default, spec.choices)
        plan = subject.plan(facts, _config({"platform.options": (f"{spec.name}={given}",)}))
        expect(
            plan.platform_options[spec.name] == given,
            f"--platform-option {spec.name}={given} came out as {plan.platform_options[spec.name]!r}",
        )


def _other_value(kind: type, default: Any, choices: tuple[Any, ...]) -> Any:
    if choices:
        return choices[-1]
    if kind is bool:
        return not default
    return "other" if kind is str else kind(1)


def _run_layers(subject: Subject) -> None:
    """A model whose layers need what attention lacks is refused before anything is loaded."""
    facts = tiny(subject).model.facts
    layer = facts.layers[0]
    needs = {
        Feature.SLIDING_WINDOW: replace(layer, window=4),
        Feature.ATTENTION_SOFTCAP: replace(layer, softcap=5.0),
        Feature.ATTENTION_SINKS: replace(layer, sinks=True),
    }
    for feature, changed in needs.items():
        try:
            subject.plan(replace(facts, layers=(changed, *facts.layers[1:])), _config({}))
        except CardanError as error:
            expect(not subject.capabilities.supports(feature), f"{feature} is claimed and refused: {error}")
            expect(str(feature) in str(error), f"the refusal does not name {feature}: {error}")
            continue
        expect(subject.capabilities.supports(feature), f"a model that needs {feature} was accepted without it")


def _run_field(subject: Subject, field: str) -> None:
    feature, changes = FIELDS[field]
    lacking = {
        str(each): FeatureAnswer(subject.capabilities.get(each).reason, subject.capabilities.get(each).alternative)
        for each in REQUEST_FEATURES
        if not subject.capabilities.supports(each)
    }
    limits = RequestLimits(vocab_size=97, platform=subject.platform.name, lacking=lacking, grammar_backend="llguidance")
    request = GenerateRequest(input_ids=(1, 2, 3), **changes)
    if subject.capabilities.supports(feature):
        others = [key for key in lacking if key != str(feature)]
        if str(Feature.SAMPLING) in others and request.sampling.temperature > 0:
            raise NotApplicableError("the request samples, which is refused for itself")
        check_request(request, limits)
        return
    try:
        check_request(request, limits)
    except RequestError as error:
        expect(subject.platform.name in str(error), f"{field}: the refusal does not name the platform: {error}")
        _hold_message(str(error), field)
        return
    raise CheckError(f"{field} needs {feature}, which the platform lacks, and was accepted")
