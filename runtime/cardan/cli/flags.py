"""Command-line flags generated from the dataclasses of ``cardan.config`` and from ``SamplingParams``.

It knows no command: a command says which groups it takes, and gets a function signature that cyclopts reads.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any

from cyclopts import Group, Parameter

from cardan.config import (
    CacheConfig,
    EngineConfig,
    GrammarConfig,
    ModelConfig,
    PlatformConfig,
    SchedulerConfig,
    ServerConfig,
)
from cardan.types import SamplingParams

GROUPS: Mapping[str, type[Any]] = {
    "model": ModelConfig,
    "platform": PlatformConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "grammar": GrammarConfig,
    "server": ServerConfig,
}
"""The groups of ``EngineConfig`` and their classes."""

ENGINE_GROUPS = ("model", "platform", "cache", "scheduler", "grammar")
"""Groups that every command which starts an engine takes; HTTP's own group is ``serve``'s alone."""

_TITLES = {
    "model": "Model",
    "platform": "Platform",
    "cache": "Cache",
    "scheduler": "Scheduler",
    "grammar": "Grammar",
    "server": "Server",
    "sampling": "Sampling",
}
_ALIASES = {
    ("model", "model"): ("--model", "--model-path"),
    ("model", "tokenizer"): ("--tokenizer", "--tokenizer-path"),
    ("platform", "options"): ("--platform-option",),
}
_SAMPLING_HELP = {
    "max_new_tokens": "most tokens to generate.",
    "min_new_tokens": "no stop before that many tokens.",
    "temperature": "0 is greedy; higher is more varied.",
    "top_p": "keep the likeliest tokens whose probabilities sum to this.",
    "top_k": "keep that many of the likeliest tokens; -1 keeps all.",
    "min_p": "drop tokens less likely than this share of the likeliest one's probability.",
    "frequency_penalty": "lower a token's logit for each time it was generated.",
    "presence_penalty": "lower a token's logit once it was generated.",
    "repetition_penalty": "divide the logits of tokens seen in prompt or output; 1 is none.",
    "seed": "of this request's noise.",
    "stop": "text that ends the answer; may be given several times.",
    "stop_regex": "pattern that ends the answer; may be given several times.",
    "stop_token_ids": "token id that ends the answer; may be given several times.",
    "ignore_eos": "go on past the end-of-sequence token.",
    "no_stop_trim": "keep the stop text in the answer.",
    "skip_special_tokens": "leave special tokens out of the text.",
    "shown_special_ids": "special token id that stays in the text; may be given several times.",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        group: the config group it belongs to, or ``sampling``.
        field: the field it sets.
        names: its spellings, the first preferred.
        kind: type of its value.
        default: value when it is not given.
        help: one line.
    """

    group: str
    field: str
    names: tuple[str, ...]
    kind: Any
    default: Any
    help: str

    @property
    def key(self) -> str:
        """Name of the parameter that carries it; groups may share field names."""
        return f"{self.group}__{self.field}"

    def parameter(self) -> inspect.Parameter:
        """The flag as a parameter that cyclopts reads."""
        negative = None if self.kind is bool and self.default is True else ""
        about = Parameter(
            name=self.names,
            help=self.help[:1].upper() + self.help[1:],
            group=Group(_TITLES[self.group], sort_key=list(_TITLES).index(self.group) + 1),
            negative=negative,
            show_default=self.default not in (None, (), False),
        )
        return inspect.Parameter(
            self.key, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=Annotated[self.kind, about]
        )


def config_flags(groups: Iterable[str]) -> tuple[Flag, ...]:
    """The flags of some groups of the config, in the order of their fields."""
    return tuple(
        _config_flag(group, item, *_describe(GROUPS[group], item)) for group in groups for item in fields(GROUPS[group])
    )


def sampling_flags() -> tuple[Flag, ...]:
    """Flags for the sampling of one request."""
    hints = typing.get_type_hints(SamplingParams)
    return tuple(
        Flag("sampling", item.name, (_flag_name(item.name),), hints[item.name], item.default, _SAMPLING_HELP[item.name])
        for item in fields(SamplingParams)
        if item.name in _SAMPLING_HELP
    )


def log_level_flag() -> Flag:
    """``--log-level`` alone, for commands that start no server."""
    return next(flag for flag in config_flags(("server",)) if flag.field == "log_level")


def read_config(values: Mapping[str, Any]) -> EngineConfig:
    """The config that parsed flags stand for; fields without a flag keep their defaults.

    Raises:
        ConfigError: a value is out of range, or two flags contradict each other.
    """
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for key, value in values.items():
        group, _, name = key.partition("__")
        if group in groups:
            groups[group][name] = value
    return EngineConfig(**{group: GROUPS[group](**given) for group, given in groups.items()})


def read_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``SamplingParams`` that parsed flags state; for the others the engine has the model's defaults."""
    prefix = "sampling__"
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def takes_flags(flags: Iterable[Flag]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a function's ``**values`` with the given flags, for cyclopts to parse."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        kept = [parameter for parameter in own if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters = [*kept, *(flag.parameter() for flag in flags)]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return function

    return decorate


def _config_flag(group: str, item: Field[Any], kind: Any, text: str) -> Flag:
    names = _ALIASES.get((group, item.name), (_flag_name(item.name),))
    default = item.default if item.default is not MISSING else None
    return Flag(group, item.name, names, kind, default, text)


def _flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _describe(cls: type[Any], item: Field[Any]) -> tuple[Any, str]:
    """Type of a field and its line in the class's docstring."""
    block = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    found = re.search(rf"^    {item.name}: (.*(?:\n      .*)*)", block, re.MULTILINE)
    if found is None:
        raise AssertionError(f"{cls.__name__}.{item.name} has no line under Attributes in its docstring")
    return typing.get_type_hints(cls)[item.name], " ".join(found.group(1).replace("``", "").split())
