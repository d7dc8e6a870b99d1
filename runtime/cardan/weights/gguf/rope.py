"""RoPE scaling of a GGUF file as the config has it.

It computes no frequencies; factors that a converter has folded into tensors are handed on as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from cardan.errors import CheckpointError, UnsupportedModelError
from cardan.quantization import dequantize
from cardan.types import TensorView
from cardan.weights.gguf.header import GgufHeader
from cardan.weights.gguf.metadata import Metadata
from cardan.weights.gguf.names import ROPE_TENSORS
from cardan.weights.mapped_file import MappedFile

RopeFactors: TypeAlias = Mapping[str, list[float]]
"""Rotary factors by the name of their tensor."""

_MOST_FACTORS = 1 << 16


def read_rope_factors(file: MappedFile, header: GgufHeader) -> dict[str, list[float]]:
    """The small tensors that hold rotary factors.

    Raises:
        CheckpointError: one is no vector of positive numbers.
    """
    factors: dict[str, list[float]] = {}
    for name in sorted(ROPE_TENSORS & header.tensors.keys()):
        tensor = header.tensors[name]
        view = TensorView(name, tensor.fmt, tensor.shape, file.view[tensor.start : tensor.start + tensor.num_bytes])
        values = dequantize(view) if len(tensor.shape) == 1 and tensor.shape[0] <= _MOST_FACTORS else None
        if values is None or not (np.isfinite(values).all() and (values > 0).all()):
            raise CheckpointError(
                f"{header.path}: {name} must be a vector of numbers above 0, got {tensor.fmt} of shape {tensor.shape}. "
                "The file is damaged; fetch it again."
            )
        factors[name] = [float(str(value)) for value in values]
    return factors


def rope_config(meta: Metadata, factors: RopeFactors, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config's ``rope_scaling`` or ``cardan_rope_factors``, or nothing where frequencies are not scaled.

    Raises:
        CheckpointError: the factors do not fit the heads.
        UnsupportedModelError: the kind of scaling is not known.
    """
    pairs = round(config["head_dim"] * config.get("partial_rotary_factor", 1)) // 2
    for name, values in factors.items():
        if len(values) != pairs:
            raise CheckpointError(
                f"{meta.path}: {name} has {len(values)} factors for {pairs} rotary frequencies. "
                "The file contradicts itself; fetch or convert it again."
            )
    if "rope_freqs.weight" in factors:
        return {"cardan_rope_factors": factors["rope_freqs.weight"]}
    scaling = _scaling(meta, factors)
    return {} if scaling is None else {"rope_scaling": scaling}


def _scaling(meta: Metadata, factors: RopeFactors) -> dict[str, Any] | None:
    if "rope_factors_long.weight" in factors and "rope_factors_short.weight" in factors:
        return _longrope(meta, factors)
    kind = meta.text("rope.scaling.type", "linear" if meta.has("rope.scale_linear") else "none")
    if kind == "none":
        return None
    if kind == "linear":
        key = "rope.scaling.factor" if meta.has("rope.scaling.factor") else "rope.scale_linear"
        factor = meta.above_zero(key, 1.0)
        return {"rope_type": "linear", "factor": factor} if factor != 1 else None
    if kind == "yarn":
        return _yarn(meta)
    raise UnsupportedModelError(
        f"{meta.path}: the RoPE scaling {kind!r} without its factors is not supported; known are none, linear, yarn, "
        "and tensors of factors."
    )


def _longrope(meta: Metadata, factors: RopeFactors) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": factors["rope_factors_long.weight"],
        "short_factor": factors["rope_factors_short.weight"],
    }
    if meta.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = meta.above_zero("rope.scaling.attn_factor")
    return scaling


def _yarn(meta: Metadata) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": meta.above_zero("rope.scaling.factor"),
        "original_max_position_embeddings": meta.positive("rope.scaling.original_context_length"),
    }
    optional = {
        "attention_factor": "rope.scaling.attn_factor",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    return scaling | {name: meta.above_zero(key) for name, key in optional.items() if meta.has(key)}
