"""What tests of native linears share: weights of every format, and how far a result may be from the exact one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from native_bench import from_bits, to_bits

from cardan.platform import LinearSpec
from cardan.quantization import FLOAT8_FORMATS, FORMATS, dequantize
from cardan.testing.conformance.linear_checks import make_view
from cardan.types import TensorView
from cardan_cpu.native_linear import NativeLinear

DENSE = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
GROUPED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *(
        f"AFFINE{bits}_{group}_{scale}"
        for bits in (4, 8)
        for group in (32, 64, 128)
        for scale in ("F16", "BF16", "F32")
    ),
    *("MXFP4", "INT4_32_F16", "INT4_64_BF16", "INT4_128_F32"),
    *("INT8_32_BF16", "INT8_64_F32", "INT8_128_F16", "INT8_128_F32_A8"),
)
FLOATS = FLOAT8_FORMATS
"""Formats whose codes are floats with a scale for each group: activations are multiplied as they are."""
EPS = 2.0**-24
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half a unit in the last place, relative to the value."""

STEPS = {"int8": 127, "int16": 127 * 256 + 127}
"""Into how many steps activations divide the largest magnitude of a group."""

CODE_BYTES = {"Q4_1": (4, 20), "Q5_1": (4, 24), "Q2_K": (16, 80), "Q4_K": (16, 144), "Q5_K": (16, 176)}
"""Where blocks with minimums keep their codes."""


@dataclass(frozen=True)
class Weight:
    """A packed weight and what is known of it.

    Attributes:
        native: the variant that packed it.
        packed: the ``NativeWeight``.
        values: exact float64 weights.
        parts: ``|scale * code| + |minimum|`` of each weight: what float32 arithmetic rounds.
        dtype: of activations.
        bias: float32, or None.
    """

    native: ModuleType
    packed: Any
    values: np.ndarray
    parts: np.ndarray
    dtype: str
    bias: np.ndarray | None = None

    def apply(self, x: np.ndarray) -> np.ndarray:
        """The linear of ``x``, in float64."""
        return read(self.packed.apply(self.tensor(x)))

    def tensor(self, x: np.ndarray) -> Any:
        """Activations in their type."""
        return self.native.Tensor.from_bits(to_bits(x, self.dtype), self.dtype)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """The linear in float64 of ``x`` as its type holds it."""
        held = from_bits(to_bits(x, self.dtype), self.dtype)
        with np.errstate(invalid="ignore"):
            return held @ self.values.T + (0.0 if self.bias is None else self.bias.astype(np.float64))

    def float_bound(self, x: np.ndarray) -> np.ndarray:
        """Of float activations: K products and sums in float32, in any order, then one rounding to the result."""
        held = np.abs(from_bits(to_bits(x, self.dtype), self.dtype))
        columns = held.shape[1]
        sums = (columns + 8) * EPS * (held @ self.parts.T + (0.0 if self.bias is None else np.abs(self.bias)))
        return sums * 1.01 + 2 * ROUNDOFF[self.dtype] * np.abs(self.exact(x)) + 1e-30

    def bound(self, x: np.ndarray, activations: str) -> np.ndarray:
        """Of rounded activations: each moves by half a step, which is a share of its group's largest magnitude."""
        if activations not in STEPS:
            return self.float_bound(x)
        held = np.abs(from_bits(to_bits(x, self.dtype), self.dtype))
        largest = held.reshape(len(held), held.shape[1] // 32, 32).max(axis=2).repeat(32, axis=1)
        moved = (0.5 / STEPS[activations] + 2 * EPS) * (largest @ np.abs(self.values).T)
        return moved * (1 + 1e-4) + 2 * self.float_bound(x)


def read(tensor: Any) -> np.ndarray:
    """Values of a tensor in float64."""
    return from_bits(np.array(tensor.bits()), tensor.dtype)


def make(
    native: ModuleType,
    fmt: str,
    shape: tuple[int, int],
    *,
    dtype: str = "float32",
    activations: str = "float",
    bias: bool = False,
    seed: int = 0,
) -> Weight:
    """A random weight of a format."""
    return pack(native, (drawn_view(fmt, *shape, seed),), dtype, activations, bias=bias)


@cache
def drawn_view(fmt: str, rows: int, columns: int, seed: int) -> TensorView:
    """A random tensor, drawn once: blocks without a writer are drawn until they have tame values."""
    return make_view(fmt, rows, columns, np.random.default_rng(seed))


def pack(
    native: ModuleType, views: tuple[TensorView, ...], dtype: str, activations: str, *, bias: bool = False
) -> Weight:
    """Pack views and compute what is exact of them."""
    columns, rows = views[0].shape[1], sum(view.shape[0] for view in views)
    spec = LinearSpec(name="weight", out_features=rows, in_features=columns, dtype=dtype)
    drawn = np.random.default_rng(rows).normal(size=rows).astype(np.float32) if bias else None
    on_device = None if drawn is None else native.Tensor.from_bits(drawn, "float32")
    packed = NativeLinear(native, activations).pack(views, spec, on_device)
    values = np.concatenate([dequantize(view) for view in views]).astype(np.float64)
    if views[0].dtype == "F32" and dtype != "float32":
        values = from_bits(to_bits(values, dtype), dtype)
    minimums = np.concatenate([_minimums(view) for view in views])
    return Weight(native, packed, values, np.abs(values - minimums) + np.abs(minimums), dtype, drawn)


def _minimums(view: TensorView) -> np.ndarray:
    """What weights are where their code is 0; zeros in formats without minimums."""
    spec = FORMATS[view.dtype]
    if view.dtype.startswith("AFFINE"):
        first, last = spec.block_bytes - spec.block_elements * spec.bits // 8, spec.block_bytes
    elif view.dtype in CODE_BYTES:
        first, last = CODE_BYTES[view.dtype]
    else:
        return np.zeros(view.shape)
    raw = np.frombuffer(view.data, np.uint8).reshape(-1, spec.block_bytes).copy()
    raw[:, first:last] = 0
    return dequantize(replace(view, data=raw.reshape(-1).data)).astype(np.float64)
