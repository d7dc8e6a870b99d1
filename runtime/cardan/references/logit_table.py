"""A model whose logits are a table: token ``i`` gives row ``i``, so that what samples from them can be tried alone.

It knows no sampler. Its one layer attends and adds nothing, so that a device sees a model like any other; one that
runs only models it was compiled for cannot load it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from cardan.errors import CheckpointError
from cardan.ops.definitions import NumpyArray
from cardan.platform import Forward, ModelFacts, Parameter, ParameterKind, Source
from cardan.platform.model import RopeTable
from cardan.types import Array, Float32Array, LayerKV, TensorView

VOCAB = 499
CONTEXT = 256
LAYER = LayerKV(index=0, q_heads=1, kv_heads=1, k_dim=8, v_dim=8, scale=0.35)


class LogitModel:
    """``hidden = embed(ids)`` and ``logits = hidden``; implements ``cardan.platform.Model``."""

    @property
    def facts(self) -> ModelFacts:
        """A model of one layer."""
        return ModelFacts(
            name="logit-table",
            architecture="LogitTable",
            family="logit-table",
            num_layers=1,
            hidden_size=VOCAB,
            intermediate_size=VOCAB,
            vocab_size=VOCAB,
            context_length=CONTEXT,
            layers=(LAYER,),
            num_parameters=VOCAB * VOCAB,
            weight_bytes=4 * VOCAB * VOCAB,
            weight_formats={"F32": 1},
            native_dtype="float32",
        )

    def parameters(self) -> tuple[Parameter, ...]:
        """The table."""
        shape = (VOCAB, VOCAB)
        return (Parameter(name="embed", kind=ParameterKind.EMBEDDING, shape=shape, sources=(Source("table"),)),)

    def rope_tables(self, context_length: int) -> tuple[RopeTable, ...]:
        """None: nothing is rotated."""
        return ()

    def hidden(self, ops: Any, weights: Mapping[str, Any], forward: Forward) -> Array:
        """Rows of the table; what attention gives is added zero times."""
        x = ops.embed(forward.input_ids, weights["embed"])
        first, rest = ops.split(x, (LAYER.k_dim, VOCAB - LAYER.k_dim))
        heads = ops.split_heads(first, LAYER.q_heads)
        seen = forward.attend(heads, heads, heads, LAYER)
        return ops.add(x, ops.scale(ops.concat((seen, rest)), 0.0))

    def logits(self, ops: Any, weights: Mapping[str, Any], hidden: Array) -> Array:
        """The same in float32."""
        return ops.cast(hidden, "float32")


class ArrayCheckpoint:
    """Float32 tensors in memory; implements ``cardan.platform.Checkpoint``."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, NumpyArray]) -> None:
        self._config = config
        self._tensors = {name: np.ascontiguousarray(values, np.float32) for name, values in tensors.items()}

    @property
    def config(self) -> Mapping[str, Any]:
        """As given."""
        return self._config

    def names(self) -> Iterable[str]:
        """Names of the tensors."""
        return self._tensors.keys()

    def tensor(self, name: str) -> TensorView:
        """One tensor.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self._tensors:
            raise CheckpointError(f"The checkpoint in memory has no tensor {name!r}, only {', '.join(self._tensors)}.")
        values = self._tensors[name]
        return TensorView(name, "F32", values.shape, values.reshape(-1).view(np.uint8).data)

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor."""
        return len(self.tensor(name).data)

    def dequantize(self, view: TensorView) -> Float32Array:
        """The values."""
        return np.frombuffer(view.data, np.float32).reshape(view.shape)

    def close(self) -> None:
        """Nothing is held."""
