"""Writes tiny random checkpoints and gives their float64 logits; needs neither torch nor a download.

It knows no platform.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cardan.models import DecoderModel, build_model
from cardan.ops import ReferenceOps
from cardan.ops.definitions import NumpyArray
from cardan.platform import Model
from cardan.testing.conformance.check import NotApplicableError
from cardan.testing.conformance.tiny_configs import CONTEXT
from cardan.testing.reference_forward import DenseForward, dense_weights, model_logits
from cardan.testing.rounded_ops import RoundedOps
from cardan.types import Float32Array

ROUNDING_SLACK = 4.0


def write_safetensors(path: Path, tensors: Mapping[str, NumpyArray]) -> None:
    """Write float32 tensors. Source: the safetensors format's own description of its header."""
    header: dict[str, Any] = {}
    offset = 0
    for name, values in tensors.items():
        size = values.size * 4
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for values in tensors.values():
            file.write(np.ascontiguousarray(values, np.float32).tobytes())


def random_tensors(shapes: Mapping[str, Sequence[int]], seed: int, norm_centre: float) -> dict[str, NumpyArray]:
    """Matrices that keep activations near 1 in size; norms scattered around their centre, biases around 0."""
    tensors: dict[str, NumpyArray] = {}
    for name, shape in shapes.items():
        key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        values = np.random.default_rng(int.from_bytes(key[:8], "little")).standard_normal(tuple(shape))
        if len(shape) == 1:
            values = 0.3 * values + (norm_centre if "norm" in name else 0.0)
        else:
            values = values * (0.5 if "embed" in name else 1.5 / np.sqrt(shape[-1]))
        tensors[name] = values.astype(np.float32)
    return tensors


class TinyCheckpoint:
    """A random checkpoint in a folder, and its reference.

    Attributes:
        folder: holds ``config.json`` and ``model.safetensors``.
        config: what the former says.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], seed: int = 0) -> None:
        """Write the checkpoint.

        Raises:
            NotApplicableError: the model does not say which tensors it reads.
        """
        self.folder = folder
        self.config = dict(config)
        model = build_model(self.config, folder.name, None)
        shapes = getattr(model, "expected_tensors", None)
        if not isinstance(model, DecoderModel) and shapes is None:
            raise NotApplicableError(
                f"{model.facts.architecture} lists no tensors (expected_tensors), so none are made up"
            )
        centre = 0.0 if model.facts.family.startswith("gemma") else 1.0
        self._tensors = random_tensors(shapes() if shapes else {}, seed, centre)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        write_safetensors(folder / "model.safetensors", self._tensors)
        info = {name: ("F32", tuple(values.shape)) for name, values in self._tensors.items()}
        self.model: Model = build_model(self.config, folder.name, info)
        self._logits: dict[tuple[int, ...], NumpyArray] = {}
        self._rounding: dict[tuple[tuple[int, ...], str], float] = {}
        self._states: dict[tuple[tuple[int, ...], str], NumpyArray] = {}

    def logits(self, ids: Sequence[int]) -> NumpyArray:
        """Float64 logits at every position, ``[len(ids), vocab]``."""
        key = tuple(ids)
        found = self._logits.get(key)
        if found is None:
            found = self._logits[key] = model_logits(self.model, self._tensors, key, context=CONTEXT)
        return found

    def rounding(self, ids: Sequence[int], dtype: str) -> float:
        """How far any logit of a sequence may be off on a device that computes in ``dtype``.

        The reference computes the sequence once more with every operation's result rounded to that type. Which way
        each rounding goes is chance, and devices round in other places: ``ROUNDING_SLACK`` times the largest
        difference are allowed.
        """
        key = (tuple(ids), dtype)
        found = self._rounding.get(key)
        if found is None:
            rounded = model_logits(self.model, self._tensors, key[0], dtype, CONTEXT)
            found = ROUNDING_SLACK * float(np.abs(rounded - self.logits(ids)).max())
            self._rounding[key] = found
        return found

    def hidden(self, ids: Sequence[int], dtype: str = "float64") -> NumpyArray:
        """Hidden states after the final norm, ``[len(ids), hidden]``; in other types than float64, as ``rounding``."""
        key = (tuple(ids), dtype)
        found = self._states.get(key)
        if found is None:
            ops = ReferenceOps() if dtype == "float64" else RoundedOps(dtype)
            forward = DenseForward(ops, key[0], self.model.rope_tables(CONTEXT))
            found = self.model.hidden(ops, dense_weights(self.model, self._tensors, ops), forward)
            self._states[key] = found
        return found

    def hidden_rounding(self, ids: Sequence[int], dtype: str) -> float:
        """How far any number of a sequence's hidden states may be off; see ``rounding``."""
        return ROUNDING_SLACK * float(np.abs(self.hidden(ids, dtype) - self.hidden(ids)).max())

    def embeds(self, ids: Sequence[int]) -> Float32Array:
        """Rows of the embedding table, ``[len(ids), hidden]``."""
        return self._tensors["model.embed_tokens.weight"][list(ids)].astype(np.float32)
