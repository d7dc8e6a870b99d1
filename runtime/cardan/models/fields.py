"""Reads typed fields out of a Hugging Face config and says which one is wrong, and how.

It knows no model family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from cardan.errors import ModelConfigError

REQUIRED: Any = object()
"""Stands for "this field has no default"."""

GREATEST_INTEGER = 2**31 - 1
"""Sizes and positions are 32-bit numbers."""
GREATEST_NUMBER = 3e38
"""What 32-bit floating point holds."""


class ConfigFields:
    """The fields of one config, or of a group inside it.

    A field that is null counts as absent, as it does for Hugging Face's own readers.
    """

    def __init__(self, config: Mapping[str, Any], group: str = "") -> None:
        self._config = config
        self._group = group

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._config.get(name) is not None

    def refuse(self, name: str, expected: str, hint: str = "Correct it in the model's config.json.") -> NoReturn:
        """Raise for a field that is wrong.

        Raises:
            ModelConfigError: always.
        """
        path = self._group + name
        if not self.has(name):
            raise ModelConfigError(f"The model's config has no {path}; expected {expected}. {hint}")
        got = repr(self._config[name])
        shown = got if len(got) <= 200 else got[:200] + " …"
        raise ModelConfigError(f"The model's config has {path} = {shown}, expected {expected}. {hint}")

    def integer(self, name: str, default: int = REQUIRED, minimum: int = 1, maximum: int = GREATEST_INTEGER) -> int:
        """An integer from ``minimum`` to ``maximum``."""
        value = self._config.get(name)
        if value is None and default is not REQUIRED:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.refuse(name, f"an integer of at least {minimum}")
        if value > maximum:
            self.refuse(name, f"an integer of at most {maximum}")
        return value

    def optional_integer(self, name: str, minimum: int = 1) -> int | None:
        """An integer, or None where absent."""
        return self.integer(name, minimum=minimum) if self.has(name) else None

    def number(self, name: str, default: float = REQUIRED, above: float = 0.0) -> float:
        """A number greater than ``above``."""
        value = self._config.get(name)
        if value is None and default is not REQUIRED:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > above:
            self.refuse(name, f"a number above {above:g}")
        if value > GREATEST_NUMBER:
            self.refuse(name, f"a number of at most {GREATEST_NUMBER:g}")
        return float(value)

    def optional_number(self, name: str, above: float = 0.0) -> float | None:
        """A number, or None where absent."""
        return self.number(name, above=above) if self.has(name) else None

    def boolean(self, name: str, default: bool = REQUIRED) -> bool:
        """True or false."""
        value = self._config.get(name)
        if value is None and default is not REQUIRED:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def optional_boolean(self, name: str) -> bool | None:
        """True or false, or None where absent."""
        return self.boolean(name) if self.has(name) else None

    def choice(self, name: str, choices: Mapping[str, Any], default: str = REQUIRED) -> Any:
        """The value that ``choices`` has for the field's text."""
        value = self._config.get(name)
        if value is None and default is not REQUIRED:
            value = default
        if not isinstance(value, str) or value not in choices:
            self.refuse(name, "one of " + ", ".join(choices))
        return choices[value]

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of ``length`` numbers."""
        value = self._config.get(name)
        if (
            not isinstance(value, list | tuple)
            or len(value) != length
            or not all(isinstance(item, int | float) for item in value)
        ):
            got = f" (got {len(value)})" if isinstance(value, list | tuple) else ""
            self.refuse(name, f"a list of {length} numbers{got}")
        return tuple(float(item) for item in value)

    def texts(self, name: str, length: int, allowed: tuple[str, ...]) -> tuple[str, ...]:
        """A list of ``length`` texts out of ``allowed``."""
        value = self._config.get(name)
        if not isinstance(value, list | tuple) or len(value) != length or not all(item in allowed for item in value):
            got = f" (got {len(value)})" if isinstance(value, list | tuple) else ""
            self.refuse(name, f"a list of {length} entries out of {', '.join(allowed)}{got}")
        return tuple(value)

    def fields(self, name: str) -> ConfigFields | None:
        """A group of fields inside this one, or None where absent."""
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.refuse(name, "an object")
        return ConfigFields(value, f"{self._group}{name}.")

    def must_be(self, name: str, wanted: Any, why: str) -> None:
        """Refuse any value but ``wanted`` (or absence) for a field that is not implemented otherwise."""
        if self.has(name) and self._config[name] != wanted:
            self.refuse(name, f"{wanted!r} or no such field, because {why}", "Use another checkpoint.")
