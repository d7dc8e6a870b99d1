"""Weights of Cardan's neutral formats as the codes, steps and layouts that torch_npu's products take.

It knows no product; it works on the host, once at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cardan.errors import UnsupportedError
from cardan.platform import LinearSpec
from cardan.quantization import FormatSpec, format_spec
from cardan.types import Float32Array, TensorView

SCALE_TYPES = {"float16": "<f2", "float32": "<f4", "bfloat16": "<u2"}

SMALLEST_NORMAL = 2.0**-14
LARGEST = 65504.0
"""Of float16."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight apart.

    Attributes:
        values: int8 ``[out_features, in_features]``.
        scales: float32 ``[out_features, groups]``.
        group: columns that share a scale.
    """

    values: npt.NDArray[np.int8]
    scales: Float32Array
    group: int

    @property
    def by_row(self) -> bool:
        """Whether a row has one scale."""
        return self.scales.shape[1] == 1 or bool((self.scales == self.scales[:, :1]).all())

    @property
    def scales_fit_float16(self) -> bool:
        """Whether float16 holds every scale to its own precision."""
        sizes = np.abs(self.scales)
        return bool(((sizes == 0) | ((sizes >= SMALLEST_NORMAL) & (sizes <= LARGEST))).all())

    def widened(self) -> Float32Array:
        """The weight's values, ``[out_features, in_features]``."""
        grouped = self.values.reshape(*self.scales.shape, -1) * self.scales[:, :, None]
        values: Float32Array = grouped.reshape(self.values.shape)
        return values


def take_apart(views: Sequence[TensorView], spec: LinearSpec) -> Codes:
    """Codes and scales of the rows of ``views``, all of one symmetric format.

    Raises:
        UnsupportedError: rows are missing, or formats differ.
    """
    parts, formats = [], []
    for view in views:  # once: the sequence may make each view as it is looked at
        formats.append(view.dtype)
        parts.append(np.frombuffer(view.data, dtype=np.uint8).copy())
    if len(set(formats)) != 1:
        raise UnsupportedError(f"{spec.name} has tensors of {', '.join(formats)}. Pack one format at a time.")
    described = format_spec(formats[0])
    blocks = np.concatenate(parts).reshape(-1, described.block_bytes)
    per_row = spec.in_features // described.block_elements
    if len(blocks) != per_row * spec.out_features:
        raise UnsupportedError(
            f"{spec.name} needs {spec.out_features} rows, but its tensors have {len(blocks) / per_row:g}. "
            "Check the model's config."
        )
    scales, values = _blocks_apart(described, blocks)
    return Codes(
        values.reshape(spec.out_features, spec.in_features),
        scales.reshape(spec.out_features, per_row),
        described.block_elements,
    )


def _blocks_apart(spec: FormatSpec, blocks: npt.NDArray[np.uint8]) -> tuple[Float32Array, npt.NDArray[np.int8]]:
    size = 2 if spec.scale in ("float16", "bfloat16") else 4
    raw = np.ascontiguousarray(blocks[:, :size]).view(SCALE_TYPES[spec.scale])[:, 0]
    if spec.scale == "bfloat16":
        scales: Float32Array = (raw.astype(np.uint32) << 16).view(np.float32)
    else:
        scales = raw.astype(np.float32)
    codes = blocks[:, size:]
    if spec.bits == 8:
        return scales, codes.view(np.int8)
    low, high = codes & 15, codes >> 4
    nibbles = np.concatenate((low, high), axis=1) if spec.name == "Q4_0" else np.stack((low, high), axis=2)
    return scales, nibbles.reshape(len(blocks), -1).astype(np.int8) - np.int8(8)
