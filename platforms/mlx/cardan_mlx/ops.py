"""``MlxOps``: the ops table on MLX arrays, described lazily and computed when a step is submitted or read.

It knows no model.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from cardan.ops import Ops
from cardan_mlx import noise, selection
from cardan_mlx.arrays import mlx_dtype

_RELATIONS: dict[str, Callable[..., mx.array]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_OPERATIONS: dict[str, Callable[..., mx.array]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
GELU_TANH_FACTOR = math.sqrt(2.0 / math.pi)
GELU_TANH_CUBE = 0.044715


@dataclass(frozen=True, slots=True)
class RopeRows:
    """Cosines and sines of one step's tokens: float32 ``[tokens, 1, rotary_dim / 2]``."""

    cos: mx.array
    sin: mx.array
    interleaved: bool


class MlxOps(Ops):
    """Every op as one or a few MLX calls."""

    def __init__(self, has_float64: bool) -> None:
        """Make the table; ``has_float64`` says whether the device computes in float64 (Metal does not)."""
        self._has_float64 = has_float64

    # --- host and device ---

    def from_host(self, array: np.ndarray[Any, Any], dtype: str | None = None) -> mx.array:
        """See ``Ops.from_host``; float64 becomes float32, which is the widest type that every device has."""
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        copied = mx.array(np.ascontiguousarray(array))
        return copied if dtype is None else copied.astype(mlx_dtype(dtype))

    def to_host(self, x: mx.array) -> np.ndarray[Any, Any]:
        """See ``Ops.to_host``."""
        return to_numpy(x)

    def cast(self, x: mx.array, dtype: str) -> mx.array:
        """See ``Ops.cast``."""
        return x.astype(mlx_dtype(dtype))

    # --- layers ---

    def embed(self, ids: mx.array, table: Any) -> mx.array:
        """See ``Ops.embed``."""
        rows: mx.array = table.gather(ids)
        return rows

    def linear(self, x: mx.array, weight: Any) -> mx.array:
        """See ``Ops.linear``."""
        out: mx.array = weight.apply(x)
        return out

    def add(self, a: mx.array, b: mx.array) -> mx.array:
        """See ``Ops.add``; the result has ``a``'s type."""
        return a + b.astype(a.dtype)

    def mul(self, a: mx.array, b: mx.array) -> mx.array:
        """See ``Ops.mul``; the result has ``a``'s type."""
        return a * b.astype(a.dtype)

    def scale(self, x: mx.array, factor: float) -> mx.array:
        """See ``Ops.scale``."""
        return x * factor

    def rms_norm(self, x: mx.array, weight: mx.array, eps: float) -> mx.array:
        """See ``Ops.rms_norm``."""
        return mx.fast.rms_norm(x.astype(mx.float32), weight, eps).astype(x.dtype)

    def layer_norm(self, x: mx.array, weight: mx.array, bias: mx.array | None, eps: float) -> mx.array:
        """See ``Ops.layer_norm``."""
        return mx.fast.layer_norm(x.astype(mx.float32), weight, bias, eps).astype(x.dtype)

    def silu(self, x: mx.array) -> mx.array:
        """See ``Ops.silu``; computed in float32."""
        wide = x.astype(mx.float32)
        return (wide * mx.sigmoid(wide)).astype(x.dtype)

    def gelu(self, x: mx.array, approximate: bool) -> mx.array:
        """See ``Ops.gelu``; computed in float32."""
        wide = x.astype(mx.float32)
        if approximate:
            bent = mx.tanh(GELU_TANH_FACTOR * (wide + GELU_TANH_CUBE * wide * wide * wide))
        else:
            bent = mx.erf(wide * math.sqrt(0.5))
        return (0.5 * wide * (1.0 + bent)).astype(x.dtype)

    def tanh_softcap(self, x: mx.array, cap: float) -> mx.array:
        """See ``Ops.tanh_softcap``; computed in float32."""
        return (cap * mx.tanh(x.astype(mx.float32) / cap)).astype(x.dtype)

    def rope(self, x: mx.array, positions: mx.array, cos: mx.array, sin: mx.array, interleaved: bool) -> mx.array:
        """See ``Ops.rope``."""
        return self.rope_apply(x, self.rope_prepare(positions, cos, sin, interleaved))

    def rope_prepare(self, positions: mx.array, cos: mx.array, sin: mx.array, interleaved: bool) -> RopeRows:
        """See ``Ops.rope_prepare``."""
        return RopeRows(mx.take(cos, positions, axis=0)[:, None], mx.take(sin, positions, axis=0)[:, None], interleaved)

    def rope_apply(self, x: mx.array, prepared: RopeRows) -> mx.array:
        """See ``Ops.rope_apply``."""
        half = prepared.cos.shape[-1]
        wide = x[..., : 2 * half].astype(mx.float32)
        if prepared.interleaved:
            first, second = wide[..., ::2], wide[..., 1::2]
        else:
            first, second = wide[..., :half], wide[..., half:]
        turned = [
            first * prepared.cos - second * prepared.sin,
            second * prepared.cos + first * prepared.sin,
        ]
        if prepared.interleaved:
            out = mx.stack(turned, axis=-1).reshape(wide.shape).astype(x.dtype)
            return out if 2 * half == x.shape[-1] else mx.concatenate([out, x[..., 2 * half :]], axis=-1)
        rest = [] if 2 * half == x.shape[-1] else [x[..., 2 * half :]]
        return mx.concatenate([part.astype(x.dtype) for part in turned] + rest, axis=-1)

    def split(self, x: mx.array, sizes: Sequence[int]) -> tuple[mx.array, ...]:
        """See ``Ops.split``."""
        if len(sizes) == 1:
            return (x,)
        return tuple(mx.split(x, np.cumsum(sizes[:-1]).tolist(), axis=-1))

    def concat(self, xs: Sequence[mx.array]) -> mx.array:
        """See ``Ops.concat``."""
        return mx.concatenate(list(xs), axis=-1)

    def split_heads(self, x: mx.array, heads: int) -> mx.array:
        """See ``Ops.split_heads``."""
        return x.reshape(x.shape[0], heads, x.shape[-1] // heads)

    def merge_heads(self, x: mx.array) -> mx.array:
        """See ``Ops.merge_heads``."""
        return mx.flatten(x, 1)

    def reshape(self, x: mx.array, shape: tuple[int, ...]) -> mx.array:
        """See ``Ops.reshape``."""
        return x.reshape(shape)

    def gather_rows(self, x: mx.array, index: mx.array) -> mx.array:
        """See ``Ops.gather_rows``."""
        return mx.take(x, index, axis=0)

    def permute_columns(self, x: mx.array, order: mx.array) -> mx.array:
        """See ``Ops.permute_columns``."""
        return mx.take(x, order, axis=-1)

    def scatter_rows(self, x: mx.array, index: mx.array, values: mx.array) -> mx.array:
        """See ``Ops.scatter_rows``; the handle changes, its memory is reused where nothing else reads it."""
        x[index] = values.astype(x.dtype)
        return x

    # --- logits and sampling ---

    def where(self, condition: mx.array, a: mx.array, b: mx.array | float) -> mx.array:
        """See ``Ops.where``; the result has ``a``'s type."""
        return mx.where(condition, a, b).astype(a.dtype)

    def compare(self, a: mx.array, relation: str, b: mx.array | float) -> mx.array:
        """See ``Ops.compare``."""
        return _RELATIONS[relation](a, b)

    def arithmetic(self, a: mx.array, operation: str, b: mx.array | float) -> mx.array:
        """See ``Ops.arithmetic``."""
        return _OPERATIONS[operation](a, b)

    def is_nan(self, x: mx.array) -> mx.array:
        """See ``Ops.is_nan``."""
        return mx.isnan(x).any(axis=-1)

    def log_softmax(self, x: mx.array) -> mx.array:
        """See ``Ops.log_softmax``."""
        return x - self.logsumexp(x)[..., None] if x.size else x

    def logsumexp(self, x: mx.array) -> mx.array:
        """See ``Ops.logsumexp``; MLX's CPU build adds in a plain loop, which loses digits over a float32 vocabulary."""
        wide = x.astype(mx.float64) if self._has_float64 else x
        return mx.logsumexp(wide, axis=-1).astype(mx.float32) if x.size else mx.zeros(x.shape[:-1])

    def argmax(self, x: mx.array) -> mx.array:
        """See ``Ops.argmax``."""
        return (mx.argmax(x, axis=-1) if x.size else mx.zeros(x.shape[:-1])).astype(mx.int32)

    def topk(self, x: mx.array, k: int) -> tuple[mx.array, mx.array]:
        """See ``Ops.topk``."""
        return selection.topk(x, k)

    def cumsum(self, x: mx.array) -> mx.array:
        """See ``Ops.cumsum``."""
        return mx.cumsum(x, axis=-1)

    def exp(self, x: mx.array) -> mx.array:
        """See ``Ops.exp``."""
        return mx.exp(x)

    def take_columns(self, x: mx.array, index: mx.array) -> mx.array:
        """See ``Ops.take_columns``."""
        return mx.take_along_axis(x, index, axis=-1)

    def scatter_add(self, x: mx.array, rows: mx.array, columns: mx.array, values: mx.array) -> mx.array:
        """See ``Ops.scatter_add``."""
        return x if values.size == 0 else x.at[rows, columns].add(values.astype(x.dtype))

    def unpack_bits(self, mask: mx.array, columns: int) -> mx.array:
        """See ``Ops.unpack_bits``."""
        bits = (mask[:, :, None] >> mx.arange(32, dtype=mx.int32)) & 1
        return mx.flatten(bits, 1)[:, :columns].astype(mx.bool_)

    def gumbel(self, seeds: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], ids: mx.array | int) -> mx.array:
        """See ``Ops.gumbel``."""
        return noise.gumbel(seeds, positions, ids, self._has_float64)


def to_numpy(x: mx.array) -> np.ndarray[Any, Any]:
    """Wait for ``x`` and copy it to numpy; bfloat16 comes as float32."""
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)
