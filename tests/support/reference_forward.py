"""Runs a model densely in numpy: the slow, plain forward pass that tests compare others with.

It knows no cache and no batch: one sequence from position 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cardan.models import build_model
from cardan.ops import ReferenceOps
from cardan.platform import Model, ParameterKind, RopeTable
from cardan.types import LayerKV


class DenseForward:
    """Implements ``cardan.platform.Forward`` over one whole sequence."""

    def __init__(self, ops: ReferenceOps, ids: list[int], ropes: tuple[RopeTable, ...]) -> None:
        self._ops = ops
        self._ropes = ropes
        self.input_ids = np.array(ids, np.int32)
        self.positions = np.arange(len(ids), dtype=np.int32)

    def rope(self, x: Any, rope_id: int) -> Any:
        table = self._ropes[rope_id]
        return self._ops.rope(x, self.positions, table.cos, table.sin, table.interleaved)

    def attend(self, q: Any, k: Any, v: Any, layer: LayerKV, sinks: Any | None = None) -> Any:
        repeats = layer.q_heads // layer.kv_heads
        keys, values = (np.repeat(part, repeats, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, keys) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * np.tanh(scores / layer.softcap)
        distance = self.positions[:, None] - self.positions[None, :]
        visible = (distance >= 0) & (distance < (layer.window or len(self.positions)))
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, values).reshape(len(q), -1)


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Config and tensors of a checkpoint that transformers wrote."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return config, tensors


def tensor_info(tensors: Mapping[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What a model is built from, as a checkpoint of float32 tensors would say it."""
    return {name: ("F32", tensor.shape) for name, tensor in tensors.items()}


def dense_weights(model: Model, tensors: Mapping[str, np.ndarray], ops: ReferenceOps) -> dict[str, Any]:
    """Weights of a model for ``ReferenceOps``, made as a loader makes them."""
    weights: dict[str, Any] = {}
    for parameter in model.parameters():
        if parameter.tied_to is not None:
            weights[parameter.name] = weights[parameter.tied_to]
            continue
        values, bias = (
            np.concatenate([tensors[s.tensor][slice(*s.rows) if s.rows else slice(None)] for s in sources])
            if sources
            else None
            for sources in (parameter.sources, parameter.bias)
        )
        assert values is not None
        assert values.shape == parameter.shape, parameter
        if parameter.kind is ParameterKind.VECTOR:
            weights[parameter.name] = ops.from_host(values) + parameter.add
        else:
            weights[parameter.name] = ops.pack(values, bias)
    return weights


def reference_logits(folder: Path, ids: list[int], dtype: str = "float64", context: int | None = None) -> np.ndarray:
    """What Cardan's model computes for one sequence; ``[len(ids), vocab]``."""
    config, tensors = read_folder(folder)
    model = build_model(config, folder.name, tensor_info(tensors))
    return model_logits(model, tensors, ids, dtype, context)


def model_logits(
    model: Model, tensors: Mapping[str, np.ndarray], ids: list[int], dtype: str = "float64", context: int | None = None
) -> np.ndarray:
    """What a model computes for one sequence; ``[len(ids), vocab]``."""
    ops = ReferenceOps(dtype)
    weights = dense_weights(model, tensors, ops)
    forward = DenseForward(ops, ids, model.rope_tables(context or len(ids)))
    return model.logits(ops, weights, model.hidden(ops, weights, forward))
