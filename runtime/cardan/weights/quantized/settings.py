"""What a config says of a quantization: fields read with their types checked, and which modules are left out.

It knows no method.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cardan.errors import CheckpointError

REGEX = "re:"
"""What module names that are patterns begin with."""


class Settings:
    """One method's fields of a config."""

    def __init__(self, values: Mapping[str, Any], where: str = "quantization_config") -> None:
        self.values = values
        self.where = where

    def whole(self, key: str, choices: Sequence[int] | None = None, default: int | None = None) -> int:
        """A whole number.

        Raises:
            CheckpointError: it is missing without a default, no whole number, or none of the choices.
        """
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or (choices is not None and value not in choices):
            expected = "a whole number" if choices is None else f"one of {', '.join(map(str, choices))}"
            raise self.refuse(key, expected)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def text(self, key: str, choices: Sequence[str] | None = None, default: str = "") -> str:
        """A text, in lower case.

        Raises:
            CheckpointError: it is no text, or none of the choices.
        """
        value = self.values.get(key) or default
        if not isinstance(value, str) or (choices is not None and value.lower() not in choices):
            raise self.refuse(key, "a text" if choices is None else f"one of {', '.join(choices)}")
        return value.lower()

    def names(self, *keys: str) -> tuple[str, ...]:
        """Lists of names, joined; what is not there is empty.

        Raises:
            CheckpointError: one is no list of texts.
        """
        found: list[str] = []
        for key in keys:
            value = self.values.get(key) or ()
            if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
                raise self.refuse(key, "a list of names")
            found.extend(value)
        return tuple(found)

    def part(self, key: str) -> Settings:
        """Fields within a field; empty where it is not there.

        Raises:
            CheckpointError: it is no object.
        """
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.refuse(key, "an object")
        return Settings(value, f"{self.where}.{key}")

    def refuse(self, key: str, expected: str) -> CheckpointError:
        """The error for a field."""
        return CheckpointError(
            f"config.json: {self.where}.{key} must be {expected}, got {self.values.get(key)!r}. "
            "Choose a checkpoint of such a kind, or fetch the config again."
        )


class ModuleNames:
    """Modules by name: a whole name, a part between dots, or a pattern after ``re:``."""

    def __init__(self, names: Sequence[str], where: str) -> None:
        """Compile them.

        Raises:
            CheckpointError: a pattern is none.
        """
        self._names = tuple(name for name in names if not name.startswith(REGEX))
        self._patterns = []
        for name in names:
            if name.startswith(REGEX):
                self._patterns.append(compiled(name.removeprefix(REGEX), where))

    def __contains__(self, module: object) -> bool:
        dotted = f".{module}."
        return any(f".{name}." in dotted for name in self._names) or any(
            pattern.match(str(module)) for pattern in self._patterns
        )


def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """A pattern of module names.

    Raises:
        CheckpointError: it is none.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(
            f"config.json: {where} has the pattern {pattern!r}, which is none: {error}. Fetch the config again."
        ) from None
