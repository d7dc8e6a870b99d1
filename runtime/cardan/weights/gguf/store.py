"""The tensors of a GGUF file under their Hugging Face names.

It knows no model: names and row orders stand in ``names``, the config in ``config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

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
        self._orders: dict[str, npt.NDArray[np.int64]] = {}
        if architecture in PERMUTED:
            head_dim = int(config["head_dim"])
            self._orders = {
                "q": unpermuted_rows(int(config["num_attention_heads"]), head_dim),
                "k": unpermuted_rows(int(config["num_key_value_heads"]), head_dim),
            }
            self._check_orders()

    def info(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Format and shape of every tensor by name."""
        return {name: (tensor.fmt, tensor.shape) for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> TensorView:
        """A tensor; query and key heads of permuted architectures are put back in order, block for block."""
        tensor = self._tensors[name]
        data = self._file.view[tensor.start : tensor.start + tensor.num_bytes]
        view = TensorView(name, tensor.fmt, tensor.shape, data)
        order = self._orders.get(head_of_rows(tensor.name) or "")
        return view if order is None else gather_rows(view, order)

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()

    def _check_orders(self) -> None:
        for tensor in self._tensors.values():
            order = self._orders.get(head_of_rows(tensor.name) or "")
            if order is not None and tensor.shape[0] != order.size:
                raise CheckpointError(
                    f"{self._file.path}: tensor {tensor.name!r} has {tensor.shape[0]} rows, but the heads of the "
                    f"metadata take {order.size}. The file contradicts itself; fetch or convert it again."
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
