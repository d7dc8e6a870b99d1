"""Typed look-ups in the metadata of a GGUF file, with errors that name the key.

It knows no architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cardan.errors import ModelConfigError, UnsupportedModelError

_LARGEST = float(np.finfo(np.float32).max)


class Metadata:
    """The metadata of one file; keys of the architecture are given without its name.

    Attributes:
        path: the file, for messages.
        architecture: ``general.architecture``.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values
        self.architecture = self._architecture()

    def _architecture(self) -> str:
        name = self._values.get("general.architecture")
        if not isinstance(name, str) or not name:
            raise ModelConfigError(
                f"{self.path}: the metadata key general.architecture must be a name, got {name!r}. "
                "Fetch or convert the model again."
            )
        return name

    def has(self, key: str) -> bool:
        """Whether the architecture's ``key`` is there."""
        return f"{self.architecture}.{key}" in self._values

    def raw(self, key: str) -> Any:
        """Value of a full key, or None."""
        return self._values.get(key)

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; a list with one value per layer passes when they are all equal.

        Raises:
            ModelConfigError: it is missing or no such number.
            UnsupportedModelError: it differs between layers.
        """
        value = self._get(key, default)
        if isinstance(value, list) and value:
            if any(other != value[0] for other in value):
                raise UnsupportedModelError(
                    f"{self.path}: {self.architecture}.{key} differs between layers, which Cardan does not run."
                )
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self._wrong(key, "a whole number above 0", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, as the shortest decimal that the file's float32 stands for.

        Raises:
            ModelConfigError: it is missing or no such number.
        """
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            raise self._wrong(key, "a finite number", value)
        return float(str(np.float32(value)))

    def above_zero(self, key: str, default: float | None = None) -> float:
        """A finite number above 0.

        Raises:
            ModelConfigError: it is missing or no such number.
        """
        value = self.number(key, default)
        if value <= 0:
            raise self._wrong(key, "a number above 0", value)
        return value

    def text(self, key: str, default: str) -> str:
        """A string.

        Raises:
            ModelConfigError: it is something else.
        """
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "text", value)
        return value

    def flags(self, key: str, count: int) -> list[bool] | None:
        """A list of ``count`` flags, or None where the key is missing or holds a single number.

        Raises:
            ModelConfigError: the list has another length.
        """
        value = self._values.get(f"{self.architecture}.{key}")
        if not isinstance(value, list):
            return None
        if len(value) != count:
            raise self._wrong(key, f"a list of {count}", value)
        return [bool(flag) for flag in value]

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelConfigError(
                f"{self.path} lacks the metadata key {self.architecture}.{key}. Fetch or convert the model again."
            )
        return value

    def _wrong(self, key: str, expected: str, value: Any) -> ModelConfigError:
        got = repr(value)
        got = got if len(got) <= 80 else got[:77] + "..."
        return ModelConfigError(
            f"{self.path}: the metadata key {self.architecture}.{key} must be {expected}, got {got}. "
            "Fetch or convert the model again."
        )
