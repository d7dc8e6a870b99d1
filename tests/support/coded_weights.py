"""Weights in every format that kernels for GPUs take, and how far sums over them may be from the exact ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cardan.ops.rounding import ROUNDOFF, SMALLEST, gamma
from cardan.quantization import FORMATS, dequantize
from cardan.testing.conformance.linear_checks import make_view
from cardan.types import TensorView

SCALE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@dataclass(frozen=True)
class Exact:
    """A weight's values, and what arithmetic on its codes adds up.

    Attributes:
        view: its bytes.
        values: float64 ``[out, in]``.
        sizes: float64 ``[out, in]``, ``|scale * code| + |offset|``.
    """

    view: TensorView
    values: np.ndarray
    sizes: np.ndarray


def drawn(fmt: str, rows: int, columns: int, seed: int = 0) -> Exact:
    """A random weight of a format."""
    view = make_view(fmt, rows, columns, np.random.default_rng(seed))
    values = dequantize(view).astype(np.float64)
    offsets = offsets_of(view)
    return Exact(view, values, np.abs(values - offsets) + np.abs(offsets))


def offsets_of(view: TensorView) -> np.ndarray:
    """The offset of each element, float64 ``[out, in]``; zeros where a format has none."""
    spec = FORMATS[view.dtype]
    if spec.symmetric:
        return np.zeros(view.shape)
    width = SCALE_BYTES[spec.scale]
    raw = np.frombuffer(view.data, np.uint8).reshape(-1, spec.block_bytes)[:, width : 2 * width]
    raw = np.ascontiguousarray(raw)
    if spec.scale == "bfloat16":
        numbers = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = raw.view({"float16": "<f2", "float32": "<f4"}[spec.scale])
    return np.repeat(numbers.astype(np.float64), spec.block_elements, axis=1).reshape(view.shape)


def allowed(x: torch.Tensor, weight: Exact, want: np.ndarray, ends: float | np.ndarray, out: torch.dtype) -> np.ndarray:
    """What results may be off by.

    Products of codes, sums of activations, and one product with a scale and one with an offset a group, all in
    float32: at most four roundings for each element of the inner axis. Then the ends are added, and the result rounded.
    """
    inner = x.shape[1]
    sizes = np.abs(x.double().numpy()) @ weight.sizes.T + ends
    rounded = ROUNDOFF[NAMES[out]] * np.abs(want) + SMALLEST[NAMES[out]]
    off: np.ndarray = gamma(4 * inner + 2, want.size) * sizes + rounded
    return off
