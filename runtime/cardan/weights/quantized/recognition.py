"""Which method a checkpoint is quantized by, from its config.

It knows the methods' names only; what they mean stands with their readers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

METHODS: Mapping[str, Callable[[Settings], Reader]] = {
    "awq": AwqReader,
    "compressed-tensors": CompressedReader,
    "fp8": Float8Reader,
    "gptq": GptqReader,
    "mxfp4": Mxfp4Reader,
}
"""Readers by ``quant_method`` of a config."""

KEY = "quantization_config"
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
        return None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"config.json: {KEY} must be an object, got {found!r}. Fetch the config again.")
    return found


def quantized_store(store: TensorStore, settings: Mapping[str, Any]) -> NotedStore:
    """The tensors of a store as its quantization's method means them.

    Raises:
        CheckpointError: the method is not known, its settings are none that Cardan reads, or tensors do not fit.
    """
    method = settings.get("quant_method")
    reader = METHODS.get(method.lower()) if isinstance(method, str) else None
    if reader is None:
        raise CheckpointError(
            f"config.json: {KEY}.quant_method is {method!r}; Cardan reads {', '.join(METHODS)}. "
            "Choose a checkpoint quantized by one of them, a GGUF file, or one that is not quantized."
        )
    return QuantizedStore(store, reader(Settings(settings)))
