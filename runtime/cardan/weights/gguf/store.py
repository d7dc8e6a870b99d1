"""The tensors of a GGUF file under their Hugging Face names.

It knows no model: names and row orders stand in ``names``, the config in ``config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cardan.errors import CheckpointError
from cardan.quantization import gather_rows
from cardan.types import TensorView
from cardan.weights.gguf.header import GgufHeader, GgufTensor
from cardan.weights.gguf.names import (
    PERMUTED,
    ROPE_TENSORS,
    head_of_rows,
    hugging_face_name,
    is_derived,
    unpermuted_rows,
)
from cardan.weights.mapped_file import MappedFile


class GgufStore:
    """Tensors of one mapped GGUF file."""

    def __init__(self, file: MappedFile, header: GgufHeader, architecture: str, config: Mapping[str, Any]) -> None:
        self._file = file
        self._tensors = _by_hugging_face_name(header, architecture, int(config["num_hidden_layers"]))
        self._heads: Mapping[str, int] = {}
        self._head_dim = int(config["head_dim"])
        if architecture in PERMUTED:
            self._heads = {"q": int(config["num_attention_heads"]), "k": int(config["num_key_value_heads"])}
            self._check_heads()

    def info(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Format and shape of every tensor by name."""
        return {name: (tensor.fmt, tensor.shape) for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> TensorView:
        """A tensor; query and key heads of permuted architectures are put back in order, block for block."""
        tensor = self._tensors[name]
        data = self._file.view[tensor.start : tensor.start + tensor.num_bytes]
        view = TensorView(name, tensor.fmt, tensor.shape, data)
        heads = self._heads_of(tensor)
        return view if heads is None else gather_rows(view, unpermuted_rows(heads, self._head_dim))

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()

    def _heads_of(self, tensor: GgufTensor) -> int | None:
        """How many heads the rows of a tensor are, where the file has them in another order."""
        return self._heads.get(head_of_rows(tensor.name) or "")

    def _check_heads(self) -> None:
        for tensor in self._tensors.values():
            heads = self._heads_of(tensor)
            if heads is not None and tensor.shape[0] != heads * self._head_dim:
                raise CheckpointError(
                    f"{self._file.path}: tensor {tensor.name!r} has {tensor.shape[0]} rows, but the metadata's {heads} "
                    f"heads of {self._head_dim} take {heads * self._head_dim}. "
                    "The file contradicts itself; fetch or convert it again."
                )


def _by_hugging_face_name(header: GgufHeader, architecture: str, num_layers: int) -> dict[str, GgufTensor]:
    named: dict[str, GgufTensor] = {}
    for name, tensor in header.tensors.items():
        if name in ROPE_TENSORS or is_derived(name):
            continue
        target = hugging_face_name(architecture, name, num_layers)
        if target is None:
            raise CheckpointError(
                f"{header.path} has a tensor {name!r}, which {architecture} models of {num_layers} layers do not have. "
                "It is a variant that Cardan does not run, or the file is damaged."
            )
        named[target] = tensor
    return named
