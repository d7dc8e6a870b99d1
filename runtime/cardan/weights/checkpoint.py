"""An opened checkpoint: a description of the model, and a store that has its tensors.

It knows no file type: stores read GGUF, read safetensors, or make tensors up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cardan.errors import CheckpointError
from cardan.quantization import dequantize, tensor_bytes
from cardan.types import Float32Array, TensorView


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """Where a tokenizer is; one of the two is set.

    Attributes:
        folder: holds tokenizer.json, tokenizer_config.json, chat_template.jinja …
        gguf: raw metadata of a GGUF file, the ``tokenizer.`` keys among them.
    """

    folder: Path | None = None
    gguf: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        assert (self.folder is None) != (self.gguf is None), "a tokenizer is in a folder or in a GGUF file"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """All of a checkpoint but its tensors.

    Attributes:
        path: the folder or file that it was read from.
        name: a short name of the model.
        config: with the keys of a Hugging Face ``config.json``.
        tokenizer: where its tokenizer is.
        generation_config: ``generation_config.json``, empty where there is none.
    """

    path: Path
    name: str
    config: Mapping[str, Any]
    tokenizer: TokenizerSource
    generation_config: Mapping[str, Any] = field(default_factory=dict)


class TensorStore(Protocol):
    """What has the tensors of a checkpoint, under Hugging Face names."""

    def info(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Format and shape of every tensor by name."""

    def tensor(self, name: str) -> TensorView:
        """A tensor that ``info`` lists."""

    def close(self) -> None:
        """Give up the files."""


class NoTensors:
    """The store of a checkpoint whose weights nobody wants."""

    def info(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Nothing."""
        return {}

    def tensor(self, name: str) -> TensorView:
        """Never called: ``info`` lists nothing."""
        raise KeyError(name)

    def close(self) -> None:
        """Nothing to give up."""


class OpenedCheckpoint:
    """A checkpoint whose files are mapped; implements ``cardan.platform.Checkpoint``."""

    def __init__(
        self,
        description: ModelDescription,
        store: TensorStore,
        notes: tuple[str, ...] = (),
        quantized_by: tuple[str, ...] = (),
    ) -> None:
        self._description = description
        self._notes = notes
        self._quantized_by = quantized_by
        self._store = store
        self._info = store.info()

    @property
    def description(self) -> ModelDescription:
        """All of it but the tensors."""
        return self._description

    @property
    def path(self) -> Path:
        """The folder or file that it was read from."""
        return self._description.path

    @property
    def name(self) -> str:
        """A short name of the model."""
        return self._description.name

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's config with the keys of a Hugging Face ``config.json``."""
        return self._description.config

    @property
    def tokenizer(self) -> TokenizerSource:
        """Where the tokenizer is."""
        return self._description.tokenizer

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The model's ``generation_config.json``, empty where there is none."""
        return self._description.generation_config

    @property
    def notes(self) -> tuple[str, ...]:
        """What the plan should say of it: how it is quantized."""
        return self._notes

    @property
    def quantized_by(self) -> tuple[str, ...]:
        """All names of the method that its linears were quantized by; empty for none."""
        return self._quantized_by

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._info.keys()

    def tensor_info(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Format and shape of every tensor by name, without touching data."""
        return self._info

    def tensor(self, name: str) -> TensorView:
        """One tensor in its file's encoding, mapped unless it had to be put together or its rows reordered.

        Raises:
            CheckpointError: there is no such tensor, or its scales are not finite.
        """
        self._entry(name)
        return self._store.tensor(name)

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor, which is not read for it.

        Raises:
            CheckpointError: there is no such tensor.
        """
        return tensor_bytes(*self._entry(name))

    def _entry(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name not in self._info:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r} among its {len(self._info)}{_similar(name, self._info)}. "
                "The weights are incomplete, or they belong to another architecture than the config."
            )
        return self._info[name]

    def dequantize(self, view: TensorView) -> Float32Array:
        """Exact float32 values of a tensor in any format that a checkpoint can hold."""
        return dequantize(view)

    def close(self) -> None:
        """Unmap the files."""
        self._store.close()


def _similar(name: str, names: Iterable[str]) -> str:
    tail = name.rsplit(".", 2)[-2:]
    for other in names:
        if other.rsplit(".", 2)[-2:] == tail:
            return f" (it has {other!r})"
    return ""
