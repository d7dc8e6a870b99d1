"""Runs a model densely in numpy: the slow, plain forward pass that platforms are compared with.

It knows no cache and no batch: one sequence from position 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cardan.ops import ReferenceOps
from cardan.ops.definitions import NumpyArray
from cardan.platform import Model, ParameterKind, RopeTable, Source
from cardan.references.attention import attend
from cardan.testing.rounded_ops import RoundedOps
from cardan.types import LayerKV


class DenseForward:
    """Implements ``cardan.platform.Forward`` over one whole sequence."""

    def __init__(self, ops: ReferenceOps, ids: Sequence[int], ropes: tuple[RopeTable, ...]) -> None:
        self._ops = ops
        self._ropes = ropes
        self.input_ids = np.array(ids, np.int32)
        self.positions = np.arange(len(ids), dtype=np.int32)
        self.given_embeds: None = None

    def rope(self, x: NumpyArray, rope_id: int) -> NumpyArray:
        """See ``Forward.rope``."""
        table = self._ropes[rope_id]
        return self._ops.rope(x, self.positions, table.cos, table.sin, table.interleaved)

    def attend(
        self, q: NumpyArray, k: NumpyArray, v: NumpyArray, layer: LayerKV, sinks: NumpyArray | None = None
    ) -> NumpyArray:
        """See ``Forward.attend``."""
        ops = self._ops
        if isinstance(ops, RoundedOps):
            return attend(q, k, v, layer, sinks, ops.narrow).out
        return attend(q, k, v, layer, sinks).out

    def rope_and_attend(
        self, q: NumpyArray, k: NumpyArray, v: NumpyArray, layer: LayerKV, sinks: NumpyArray | None = None
    ) -> NumpyArray:
        """See ``RotatingForward.rope_and_attend``."""
        return self.attend(self.rope(q, layer.rope_id), self.rope(k, layer.rope_id), v, layer, sinks)


def dense_weights(model: Model, tensors: Mapping[str, NumpyArray], ops: ReferenceOps) -> dict[str, Any]:
    """Weights of a model for ``ReferenceOps``, made as a loader makes them."""
    weights: dict[str, Any] = {}
    for parameter in model.parameters():
        if parameter.tied_to is not None:
            weights[parameter.name] = weights[parameter.tied_to]
            continue
        values = _joined(tensors, parameter.sources)
        assert values is not None, parameter
        assert values.shape == parameter.shape, parameter
        if parameter.kind is ParameterKind.VECTOR:
            weights[parameter.name] = ops.from_host(values) + parameter.add
        else:
            weights[parameter.name] = ops.pack(values, _joined(tensors, parameter.bias))
    return weights


def _joined(tensors: Mapping[str, NumpyArray], sources: Sequence[Source]) -> NumpyArray | None:
    if not sources:
        return None
    return np.concatenate([tensors[s.tensor][slice(*s.rows) if s.rows else slice(None)] for s in sources])


def model_logits(
    model: Model,
    tensors: Mapping[str, NumpyArray],
    ids: Sequence[int],
    dtype: str = "float64",
    context: int | None = None,
) -> NumpyArray:
    """What a model computes for one sequence; ``[len(ids), vocab]``.

    Args:
        model: built from the tensors' names and shapes.
        tensors: values by Hugging Face name.
        ids: the sequence.
        dtype: float64, or a type that every operation's result is rounded to.
        context: length that RoPE tables are made for; the sequence's by default.
    """
    ops = ReferenceOps() if dtype == "float64" else RoundedOps(dtype)
    weights = dense_weights(model, tensors, ops)
    forward = DenseForward(ops, ids, model.rope_tables(context or len(ids)))
    logits: NumpyArray = model.logits(ops, weights, model.hidden(ops, weights, forward))
    return logits
