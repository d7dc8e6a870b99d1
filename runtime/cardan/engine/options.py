"""Turns flat keyword options into an ``EngineConfig``, and the other way round.

It knows no flag syntax (the CLI has its own) and resolves nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from cardan.config import EngineConfig
from cardan.errors import ConfigError

_RENAMED = {("platform", "options"): "platform_options"}
"""Fields whose flat name is not their own."""


def _flat_names() -> dict[str, tuple[str, str]]:
    names: dict[str, tuple[str, str]] = {}
    for group, values in dataclasses.asdict(EngineConfig()).items():
        for name in values:
            names[_RENAMED.get((group, name), name)] = (group, name)
    return names


def config_from_options(options: Mapping[str, Any]) -> EngineConfig:
    """An ``EngineConfig`` from options such as ``model``, ``platform`` or ``max_total_tokens``.

    ``platform_options`` may be a mapping or a sequence of ``name=value``.

    Raises:
        ConfigError: an option is unknown, has the wrong type, is out of range, or contradicts another.
    """
    known, defaults = _flat_names(), EngineConfig()
    groups: dict[str, dict[str, Any]] = {}
    for name, given in options.items():
        if name not in known:
            raise _unknown_option(name, known)
        value = given
        if name == "platform_options" and isinstance(given, Mapping):
            value = tuple(f"{key}={item}" for key, item in given.items())
        group, field = known[name]
        try:
            converted = msgspec.convert(value, typing.get_type_hints(type(getattr(defaults, group)))[field])
        except msgspec.ValidationError as error:
            raise ConfigError(f"{name}={value!r} is wrong: {str(error).split(' - at')[0]}.") from None
        groups.setdefault(group, {})[field] = converted
    changed = {group: dataclasses.replace(getattr(defaults, group), **values) for group, values in groups.items()}
    return dataclasses.replace(defaults, **changed)


def _unknown_option(name: str, known: Mapping[str, Any]) -> ConfigError:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(known))}."
    return ConfigError(f"{name!r} is not an option of the engine. {hint}")
