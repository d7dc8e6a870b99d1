"""Cardan's own models in numpy over checkpoints that transformers wrote, as the reference of the tests.

The forward pass itself is shipped: ``cardan.testing.reference_forward``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cardan.models import build_model
from cardan.testing.reference_forward import DenseForward, dense_weights, model_logits

__all__ = ["DenseForward", "dense_weights", "model_logits", "read_folder", "reference_logits", "tensor_info"]


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


def reference_logits(folder: Path, ids: list[int], dtype: str = "float64", context: int | None = None) -> np.ndarray:
    """What Cardan's model computes for one sequence; ``[len(ids), vocab]``."""
    config, tensors = read_folder(folder)
    model = build_model(config, folder.name, tensor_info(tensors))
    return model_logits(model, tensors, ids, dtype, context)
