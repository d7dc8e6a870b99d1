"""Tiny Llama checkpoints as ModelSlim leaves them behind, written from the description of its format.

``write(folder, kind)`` gives the float64 values that every tensor means.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import quantized_checkpoints as made

DESCRIPTION = "quant_model_description.json"
INDEX = "quant_model_weights.safetensors.index.json"
STEP = 0.04
"""Of all activations of W8A8: few of a tiny model exceed 127 of it."""


def dynamic(weight: np.ndarray, offset: float = 0.0) -> tuple[dict[str, Any], np.ndarray]:
    scale = (np.abs(weight).max(axis=1, keepdims=True) / 100).astype(np.float32)
    offsets = np.full_like(scale, offset)
    codes = np.clip(np.round(weight / scale) + offsets, -128, 127).astype(np.int8)
    tensors = {".weight": codes, ".weight_scale": scale, ".weight_offset": offsets}
    return tensors, (codes.astype(np.float64) - offsets) * scale.astype(np.float64)


def static(weight: np.ndarray, int64: bool, bias: np.ndarray | None = None) -> tuple[dict[str, Any], np.ndarray]:
    """``quant_bias`` is rounded of float32, as the tool computes it."""
    tensors, _ = dynamic(weight)
    step = np.array([STEP], np.float32)
    product = (tensors[".weight_scale"][:, 0] * step).astype(np.float32)
    stored = product.view(np.uint32).astype(np.int64) if int64 else product
    shift = tensors[".weight"].astype(np.float32).sum(axis=1) * np.float32(ZERO)
    share = np.float32(0) if bias is None else bias.astype(np.float32) / product
    parts = {
        ".weight": tensors[".weight"],
        ".input_scale": step,
        ".input_offset": np.array([ZERO], np.float32),
        ".deq_scale": stored,
        ".quant_bias": np.round(share - shift).astype(np.int32),
    }
    if bias is not None:
        parts[".bias"] = bias
    return parts, tensors[".weight"].astype(np.float64) * (product / step)[:, None].astype(np.float64)


ZERO = 3
"""The code of 0 of activations of W8A8."""


KINDS = {
    "W8A8_DYNAMIC": (dynamic, "INT8_128_F32_A8"),
    "W8A16": (dynamic, "INT8_128_F32"),
    "W8A16 with offsets": (lambda weight: dynamic(weight, 7.0), "AFFINE8_128_F32"),
    "W8A8": (lambda weight: static(weight, int64=False), "INT8_128_F32_A8"),
    "W8A8 for float16": (lambda weight: static(weight, int64=True), "INT8_128_F32_A8"),
}


def write(folder: Path, kind: str, described: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """A checkpoint as ModelSlim leaves it behind; returns the values that it means."""
    rng = np.random.default_rng(1)
    tensors: dict[str, Any] = {}
    values: dict[str, np.ndarray] = {}
    description: dict[str, Any] = {"model_quant_type": kind.split(maxsplit=1)[0], "version": "1.0.0"}
    for name, shape in made.shapes().items():
        drawn = rng.normal(size=shape).astype(np.float32) / (1 if len(shape) == 1 else shape[-1] ** 0.5)
        module = name.removesuffix(".weight")
        if len(shape) == 1 or "embed" in name or "lm_head" in name:
            tensors[name], values[name], description[name] = drawn, drawn.astype(np.float64), "FLOAT"
            continue
        parts, values[name] = KINDS[kind][0](drawn)
        tensors |= {module + end: part for end, part in parts.items()}
        description |= {module + end: kind.split(maxsplit=1)[0] for end in parts}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(made.CONFIG))
    (folder / DESCRIPTION).write_text(json.dumps({**description, **(described or {})}))
    names = sorted(tensors)
    files = {
        "quant_model_weights-00001-of-00002.safetensors": names[::2],
        "quant_model_weights-00002-of-00002.safetensors": names[1::2],
    }
    for file, held in files.items():
        made.save(folder / file, {name: tensors[name] for name in held})
    where = {name: file for file, held in files.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return values
