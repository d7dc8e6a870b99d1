"""What every operation means, as one numpy function each: the references of the specs and of ``ReferenceOps``.

It knows no device, no packing and no speed. Functions keep the element type that they are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

NumpyArray: TypeAlias = npt.NDArray[Any]

_erf: Callable[[NumpyArray], NumpyArray] = np.vectorize(math.erf, otypes=[np.float64])

COMPARISONS = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
}
ARITHMETIC = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}


def linear(x: NumpyArray, weight: NumpyArray) -> NumpyArray:
    """``x @ weight.T``."""
    out: NumpyArray = x @ weight.T
    return out


def rms_norm(x: NumpyArray, weight: NumpyArray, eps: float) -> NumpyArray:
    """Root mean square normalization. Source: Zhang and Sennrich 2019, equation 4."""
    normed: NumpyArray = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight
    return normed


def layer_norm(x: NumpyArray, weight: NumpyArray, bias: NumpyArray | None, eps: float) -> NumpyArray:
    """Layer normalization with the biased variance. Source: Ba et al. 2016, equation 4."""
    centred = x - x.mean(axis=-1, keepdims=True)
    normed: NumpyArray = (
        centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight
    )
    return normed if bias is None else normed + bias


def silu(x: NumpyArray) -> NumpyArray:
    """``x * sigmoid(x)``, without overflow for very negative ``x``."""
    half = x.dtype.type(0.5)
    out: NumpyArray = x * (half + half * np.tanh(half * x))
    return out


def gelu(x: NumpyArray, approximate: bool) -> NumpyArray:
    """Gaussian error linear unit. Source: Hendrycks and Gimpel 2016, section 2."""
    if approximate:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + np.tanh(inner))
    return 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)).astype(x.dtype))


def tanh_softcap(x: NumpyArray, cap: float) -> NumpyArray:
    """``cap * tanh(x / cap)``."""
    return cap * np.tanh(x / cap)


def rope(x: NumpyArray, positions: NumpyArray, cos: NumpyArray, sin: NumpyArray, interleaved: bool) -> NumpyArray:
    """Rotary position embedding. Source: Su et al., "RoFormer", equation 34."""
    half = cos.shape[1]
    c, s = cos[positions][:, None, :].astype(x.dtype), sin[positions][:, None, :].astype(x.dtype)
    out = x.copy()
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        out[..., 0 : 2 * half : 2] = first * c - second * s
        out[..., 1 : 2 * half : 2] = second * c + first * s
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
        out[..., :half] = first * c - second * s
        out[..., half : 2 * half] = second * c + first * s
    return out


def split(x: NumpyArray, sizes: Sequence[int]) -> tuple[NumpyArray, ...]:
    """Pieces of the last axis."""
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis=-1))


def split_heads(x: NumpyArray, heads: int) -> NumpyArray:
    """``[tokens, heads * dim]`` to ``[tokens, heads, dim]``."""
    return x.reshape(x.shape[0], heads, x.shape[1] // heads)


def merge_heads(x: NumpyArray) -> NumpyArray:
    """``[tokens, heads, dim]`` to ``[tokens, heads * dim]``."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2])


def scatter_rows(x: NumpyArray, index: NumpyArray, values: NumpyArray) -> NumpyArray:
    """A copy of ``x`` with some rows replaced."""
    out = x.copy()
    out[index] = values
    return out


def where(condition: NumpyArray, a: NumpyArray, b: NumpyArray | float) -> NumpyArray:
    """``a`` or ``b``, in ``a``'s type."""
    return np.where(condition, a, np.asarray(b, dtype=a.dtype))


def compare(a: NumpyArray, relation: str, b: NumpyArray | float) -> NumpyArray:
    """Elementwise relation; returns bool."""
    result: NumpyArray = COMPARISONS[relation](a, b)
    return result


def arithmetic(a: NumpyArray, operation: str, b: NumpyArray | float) -> NumpyArray:
    """Elementwise sum, difference, product or quotient, in ``a``'s type."""
    result: NumpyArray = ARITHMETIC[operation](a, np.asarray(b, dtype=a.dtype))
    return result


def is_nan(x: NumpyArray) -> NumpyArray:
    """Whether each row holds a NaN."""
    found: NumpyArray = np.any(np.isnan(x), axis=-1, keepdims=True)
    return found[..., 0]


def logsumexp(x: NumpyArray) -> NumpyArray:
    """Shifted by the largest entry, so that nothing overflows; a row of ``-inf`` gives ``-inf``."""
    top = x.max(axis=-1, keepdims=True)
    shift = np.where(np.isfinite(top), top, 0).astype(x.dtype)
    with np.errstate(divide="ignore"):
        total: NumpyArray = np.log(np.exp(x - shift).sum(axis=-1)) + shift[..., 0]
    return total


def log_softmax(x: NumpyArray) -> NumpyArray:
    """``x - logsumexp(x)``."""
    out: NumpyArray = x - logsumexp(x)[..., None]
    return out


def argmax(x: NumpyArray) -> NumpyArray:
    """Index of the first largest entry."""
    best: NumpyArray = np.asarray(np.argmax(x, axis=-1), dtype=np.int32)
    return best


def topk(x: NumpyArray, k: int) -> tuple[NumpyArray, NumpyArray]:
    """The ``k`` largest, largest first, equal values by lower index first."""
    order = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(x, order, axis=-1), order.astype(np.int32)


def cumsum(x: NumpyArray) -> NumpyArray:
    """Running sum over the last axis."""
    total: NumpyArray = np.cumsum(x, axis=-1, dtype=x.dtype)
    return total


def scatter_add(x: NumpyArray, rows: NumpyArray, columns: NumpyArray, values: NumpyArray) -> NumpyArray:
    """A copy of ``x`` with values added, repeated places summed."""
    out = x.copy()
    np.add.at(out, (rows, columns), values)
    return out


def unpack_bits(mask: NumpyArray, columns: int) -> NumpyArray:
    """Bit ``j & 31`` of word ``j >> 5`` is column ``j``."""
    words = np.ascontiguousarray(mask).view(np.uint32)
    bits = (words[:, :, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return bits.reshape(mask.shape[0], 32 * mask.shape[1])[:, :columns].astype(bool)
