"""The ops table of the Acme A1 in float32; each method stands for a kernel that a real device would have."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from cardan.ops import Ops

Array = np.ndarray[Any, Any]
F = np.float32
SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne}
SUMS = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}
erf = np.vectorize(math.erf, otypes=[np.float64])


class AcmeOps(Ops):
    """See ``cardan.ops.Ops`` for what each operation means."""

    to_host = staticmethod(np.copy)
    cast = staticmethod(np.ndarray.astype)
    embed = staticmethod(lambda ids, table: table.gather(ids))
    linear = staticmethod(lambda x, weight: weight.apply(x))
    add = staticmethod(np.add)
    mul = staticmethod(np.multiply)
    exp = staticmethod(np.exp)
    scale = staticmethod(lambda x, factor: x * F(factor))
    silu = staticmethod(lambda x: x / (F(1) + np.exp(-np.clip(x, F(-80), None))))
    tanh_softcap = staticmethod(lambda x, cap: F(cap) * np.tanh(x / F(cap)))
    concat = staticmethod(partial(np.concatenate, axis=-1))
    reshape = staticmethod(np.reshape)
    gather_rows = staticmethod(operator.getitem)
    is_nan = staticmethod(lambda x: np.isnan(x).any(axis=-1))
    cumsum = staticmethod(partial(np.cumsum, axis=-1))
    take_columns = staticmethod(partial(np.take_along_axis, axis=-1))

    def from_host(self, array: Array, dtype: str | None = None) -> Array:
        return np.array(array, F if array.dtype == np.float64 else dtype, order="C")

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + F(eps)) * weight

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
        return self.rms_norm(x - x.mean(axis=-1, keepdims=True), weight, eps) + (F(0) if bias is None else bias)

    def gelu(self, x: Array, approximate: bool) -> Array:
        if approximate:
            return F(0.5) * x * (F(1) + np.tanh(F(0.7978845608) * (x + F(0.044715) * x * x * x)))
        return (0.5 * x * (1 + erf(x / math.sqrt(2)))).astype(F)

    def rope(self, x: Array, positions: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
        half = cos.shape[1]
        pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
        c, s = cos[positions][:, None], sin[positions][:, None]
        a, b = x[..., pairs[0]], x[..., pairs[1]]
        out = x.copy()
        out[..., pairs[0]], out[..., pairs[1]] = a * c - b * s, b * c + a * s
        return out

    def split(self, x: Array, sizes: Sequence[int]) -> tuple[Array, ...]:
        return tuple(np.split(x, np.cumsum(sizes)[:-1], axis=-1))

    def split_heads(self, x: Array, heads: int) -> Array:
        return x.reshape(len(x), heads, x.shape[1] // heads)

    def merge_heads(self, x: Array) -> Array:
        return x.reshape(len(x), x.shape[1] * x.shape[2])

    def scatter_rows(self, x: Array, index: Array, values: Array) -> Array:
        x[index] = values
        return x

    def where(self, condition: Array, a: Array, b: Array | float) -> Array:
        return np.where(condition, a, np.asarray(b, a.dtype))

    def compare(self, a: Array, relation: str, b: Array | float) -> Array:
        return SIGNS[relation](a, b)

    def arithmetic(self, a: Array, operation: str, b: Array | float) -> Array:
        return SUMS[operation](a, np.asarray(b, a.dtype))

    def log_softmax(self, x: Array) -> Array:
        return x - self.logsumexp(x)[..., None]

    def logsumexp(self, x: Array) -> Array:
        with np.errstate(invalid="ignore"):  # a row of NaN is the caller's to find
            return np.logaddexp.reduce(x, axis=-1, dtype=np.float64).astype(F)

    def argmax(self, x: Array) -> Array:
        return x.argmax(axis=-1).astype(np.int32)

    def topk(self, x: Array, k: int) -> tuple[Array, Array]:
        ids = np.argsort(-x, axis=-1, kind="stable")[..., :k] if k > 1 else x.argmax(axis=-1)[..., None]
        return np.take_along_axis(x, ids, axis=-1), ids.astype(np.int32)

    def scatter_add(self, x: Array, rows: Array, columns: Array, values: Array) -> Array:
        np.add.at(x, (rows, columns), values)
        return x

    def unpack_bits(self, mask: Array, columns: int) -> Array:
        return np.unpackbits(mask.view(np.uint8), axis=-1, count=columns, bitorder="little").astype(bool)

    def gumbel(self, seeds: Array, positions: Array, ids: Array | int) -> Array:
        wanted = np.arange(ids)[None] if isinstance(ids, int) else ids
        words = philox(wanted >> 2, positions[:, None], seeds[:, None].astype(np.uint64))
        word = np.choose(wanted & 3, [np.broadcast_to(w, words[2].shape) for w in words])
        return -np.log(-np.log((word + 0.5) * 2.0**-32)).astype(F)


def philox(block: Array, position: Array, seed: Array) -> tuple[Array, ...]:
    """Ten rounds of Philox4x32 over the counter ``(block, position, 0, 0)``; source: Salmon et al., SC 2011."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [np.asarray(word).astype(np.uint64) for word in (block, position, 0, 0)]
    key = [seed & low, seed >> shift]
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(second >> shift) ^ c[1] ^ key[0], second & low, (first >> shift) ^ c[3] ^ key[1], first & low]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    return tuple(c)
