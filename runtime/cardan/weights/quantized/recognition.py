"""Which method a checkpoint is quantized by, from its config.

It knows the methods' names only; what they mean stands with their readers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cardan.errors import CheckpointError
from cardan.weights.checkpoint import TensorStore
from cardan.weights.json_file import read_json_object
from cardan.weights.quantized.awq import AwqReader
from cardan.weights.quantized.compressed import CompressedReader
from cardan.weights.quantized.float8 import Float8Reader
from cardan.weights.quantized.gptq import GptqReader
from cardan.weights.quantized.mxfp4 import Mxfp4Reader
from cardan.weights.quantized.reader import Reader
from cardan.weights.quantized.settings import Settings
from cardan.weights.quantized.store import QuantizedStore


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMethod:
    """One way to quantize checkpoints.

    Attributes:
        reader: made from the settings of a checkpoint.
        settings_file: beside config.json, by which such checkpoints are recognised where their config says nothing;
            its content is the setting ``SETTINGS``. Empty for none.
        aliases: other names of the method, in configs and for ``--quantization``.
    """

    reader: Callable[[Settings], Reader]
    settings_file: str = ""
    aliases: tuple[str, ...] = ()


METHODS: dict[str, CheckpointMethod] = {
    "awq": CheckpointMethod(reader=AwqReader),
    "compressed-tensors": CheckpointMethod(reader=CompressedReader),
    "fp8": CheckpointMethod(reader=Float8Reader),
    "gptq": CheckpointMethod(reader=GptqReader),
    "mxfp4": CheckpointMethod(reader=Mxfp4Reader),
}
"""By ``quant_method`` of a config; plugins add to them."""

KEY = "quantization_config"
SETTINGS = "settings_file"
"""Key of the settings under which a method finds the content of its own file."""
_OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files beside config.json in which older tools wrote the settings, and the method that they are of."""


class NotedStore(TensorStore, Protocol):
    """A store that has something to say of its tensors."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the plan."""


def quantization_settings(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a folder says of its quantization: a field of its config or of the config of its text model, or a file.

    Raises:
        CheckpointError: it is no object.
    """
    text = config.get("text_config")
    found = config.get(KEY)
    if found is None and isinstance(text, Mapping):
        found = text.get(KEY)
    if found is None:
        for name, method in _OLDER_FILES.items():
            if (folder / name).is_file():
                return {"quant_method": method, **read_json_object(folder / name)}
        return _own_settings(folder, {})
    if not isinstance(found, Mapping):
        raise CheckpointError(f"config.json: {KEY} must be an object, got {found!r}. Fetch the config again.")
    return _own_settings(folder, found) or found


def _own_settings(folder: Path, said: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Settings with the file of the method that the config names, or of the first whose file is there."""
    named = said.get("quant_method")
    for name, method in METHODS.items():
        if method.settings_file and (named is None or method_name(named) == name):
            file = folder / method.settings_file
            if file.is_file():
                return {**said, "quant_method": name, SETTINGS: read_json_object(file)}
    return None


def method_name(named: object) -> str | None:
    """The name in ``METHODS`` of a method that goes by this name, or None."""
    if not isinstance(named, str):
        return None
    lowered = named.lower()
    return next((name for name, method in METHODS.items() if lowered in (name, *method.aliases)), None)


def names_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """All names of the method of a checkpoint's settings."""
    name = method_name(settings.get("quant_method"))
    return () if name is None else (name, *METHODS[name].aliases)


def quantized_store(store: TensorStore, settings: Mapping[str, Any]) -> NotedStore:
    """The tensors of a store as its quantization's method means them.

    Raises:
        CheckpointError: the method is not known, its settings are none that Cardan reads, or tensors do not fit.
    """
    name = method_name(settings.get("quant_method"))
    if name is None:
        raise CheckpointError(
            f"config.json: {KEY}.quant_method is {settings.get('quant_method')!r}; Cardan reads {', '.join(METHODS)}. "
            "Choose a checkpoint quantized by one of them, a GGUF file, or one that is not quantized."
        )
    return QuantizedStore(store, METHODS[name].reader(Settings(settings)))
