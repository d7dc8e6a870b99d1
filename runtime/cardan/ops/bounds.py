"""How far each result of an operation may be off: derived from the roundings that happen, element by element.

They know no platform. The first number of a bound is what the last rounding to the tried type may do, the others what
is computed before it in float32. Where many roundings add up, they are taken to be as good as independent, and a sum
of ``n`` terms may be off by ``min(n, λ √n)`` roundings instead of ``n``: so far it gets in one of a billion runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from cardan.ops import definitions
from cardan.ops.definitions import NumpyArray
from cardan.ops.rounding import ROUNDOFF, SMALLEST, gamma, spread_factor

Allowed: TypeAlias = "NumpyArray | float"


@dataclass(frozen=True, slots=True)
class Tried:
    """One case of an operation.

    Attributes:
        arguments: in float64, with values that the tried type holds.
        want: the reference's results.
        dtype: the tried type.
    """

    arguments: tuple[Any, ...]
    want: tuple[NumpyArray, ...]
    dtype: str

    @property
    def u(self) -> float:
        """Roundoff of the tried type."""
        return ROUNDOFF[self.dtype]

    @property
    def w(self) -> float:
        """Roundoff of what is computed before the result is rounded: float32, or finer where that is tried."""
        return min(self.u, ROUNDOFF["float32"])

    def gamma(self, terms: int) -> float:
        """What the sum of ``terms`` terms may be off by, relative to the sum of their sizes."""
        return gamma(terms, max(result.size for result in self.want), self.w)

    def rounded(self, size: NumpyArray, roundings: float = 1.0) -> NumpyArray:
        """Results of some size after so many roundings to the tried type, the first of which was one to float32."""
        before = self.w if self.u > self.w else 0.0
        result: NumpyArray = (roundings * self.u + before) * np.abs(size) + roundings * SMALLEST[self.dtype]
        return result


Bound: TypeAlias = Callable[[Tried], tuple[Allowed, ...]]
"""For each result what its elements may be off by; the last entry stands for all that follow."""


def exact(tried: Tried) -> tuple[Allowed, ...]:
    """Values are moved, compared or counted, and nothing is rounded."""
    return (0.0,)


def rounded(tried: Tried) -> tuple[Allowed, ...]:
    """One operation of IEEE arithmetic, rounded once."""
    return (tried.rounded(tried.want[0]),)


DIVISION = 5.0
"""Roundings of a quotient: not every device divides as IEEE 754 wants it. Source: OpenCL C and the Metal Shading
Language both promise 2.5 units in the last place, which are two roundings each."""


def arithmetic(tried: Tried) -> tuple[Allowed, ...]:
    """Rounded once; quotients are what devices promise."""
    return (tried.rounded(tried.want[0], DIVISION if tried.arguments[1] == "/" else 1.0),)


def linear(tried: Tried) -> tuple[Allowed, ...]:
    """A sum over the inner size in float32, which is rounded, and once more with the bias.

    Source: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019, theorem 3.1.
    """
    sizes, bias, _ = _linear_sizes(tried)
    return (tried.gamma(_inner(tried) + 1) * (sizes + bias) + tried.rounded(np.abs(tried.want[0]) + bias, 2.0),)


def linear_add(tried: Tried) -> tuple[Allowed, ...]:
    """The residual is one more term of the sum in float32, which is rounded once."""
    sizes, bias, residual = _linear_sizes(tried)
    return (tried.gamma(_inner(tried) + 2) * (sizes + bias + residual) + tried.rounded(tried.want[0]),)


def linear_add_composed(tried: Tried) -> tuple[Allowed, ...]:
    """The product is rounded, once more with the bias, and the sum with the residual."""
    x, weight = tried.arguments[:2]
    product = np.abs(definitions.linear(x, weight.values))
    sizes, bias, _ = _linear_sizes(tried)
    inner = tried.gamma(_inner(tried) + 1) * (sizes + bias)
    return (inner + tried.rounded(product + 2 * bias, 2.0) + tried.rounded(tried.want[0]),)


def linear_float32(tried: Tried) -> tuple[Allowed, ...]:
    """A sum in float32, whatever the tried type; rounded to that type is neither it nor the sum with the bias."""
    sizes, bias, _ = _linear_sizes(tried)
    return (tried.gamma(_inner(tried) + 1) * (sizes + bias) + 2 * tried.w * (np.abs(tried.want[0]) + bias),)


def _inner(tried: Tried) -> int:
    return int(tried.arguments[0].shape[1])


def _linear_sizes(tried: Tried) -> tuple[NumpyArray, NumpyArray | float, NumpyArray | float]:
    """Sizes of what a linear adds up: of its products, its bias and, where there is one, the residual."""
    x, weight = tried.arguments[:2]
    sizes = np.abs(x) @ np.abs(weight.values).T
    bias = 0.0 if weight.bias is None else np.abs(weight.bias)
    return sizes, bias, np.abs(tried.arguments[2]) if len(tried.arguments) > 2 else 0.0


def rms_norm(tried: Tried) -> tuple[Allowed, ...]:
    """The mean of squares under a root, a quotient and two products; a narrow type may be rounded to in between."""
    columns = tried.arguments[0].shape[-1]
    inner = tried.gamma(columns) / 2 + 4 * tried.w
    return (inner * np.abs(tried.want[0]) + tried.rounded(tried.want[0], 2.0),)


def add_rms_norm(tried: Tried) -> tuple[Allowed, ...]:
    """The sum is rounded once, which moves each element and the mean under the root by one rounding each."""
    columns = tried.arguments[0].shape[-1]
    inner = tried.gamma(columns) / 2 + 4 * tried.w
    return inner * np.abs(tried.want[0]) + tried.rounded(tried.want[0], 4.0), tried.rounded(tried.want[1])


def layer_norm(tried: Tried) -> tuple[Allowed, ...]:
    """The mean, what is left without it, the mean of its squares under a root, a quotient, a product and a sum."""
    x, weight, bias, eps = tried.arguments
    gamma_n = tried.gamma(x.shape[-1])
    centred = np.abs(x - x.mean(axis=-1, keepdims=True))
    root = np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps)
    mean_off = gamma_n * np.abs(x).mean(axis=-1, keepdims=True)
    root_off = gamma_n / 2 + (mean_off / root) ** 2 + 4 * tried.w
    scaled = np.abs(weight) * (centred * (1 + root_off) + mean_off) / root
    off = np.abs(weight) / root * (mean_off + (root_off + tried.w) * centred)
    shift = 0.0 if bias is None else np.abs(bias)
    return (off + tried.rounded(scaled + shift, 2.0),)


def gate(tried: Tried) -> tuple[Allowed, ...]:
    """SiLU and GELU: a product with a factor between 0 and 1, which may be the small difference of two halves."""
    return (_gated(tried, tried.arguments[0], tried.want[0]),)


def _gated(tried: Tried, x: NumpyArray, want: NumpyArray) -> NumpyArray:
    inner: NumpyArray = 4 * tried.w * np.maximum(np.abs(x), np.abs(want))
    return inner + tried.rounded(want)


def silu_mul(tried: Tried) -> tuple[Allowed, ...]:
    """The gate's bound times the other half, and one rounding of the product."""
    gate_up, size = tried.arguments[:2]
    opened = definitions.silu(gate_up[:, :size])
    return (_gated(tried, gate_up[:, :size], opened) * np.abs(gate_up[:, size:]) + tried.rounded(tried.want[0]),)


def gelu_mul(tried: Tried) -> tuple[Allowed, ...]:
    """The same with GELU."""
    gate_up, size, approximate = tried.arguments
    opened = definitions.gelu(gate_up[:, :size], approximate)
    return (_gated(tried, gate_up[:, :size], opened) * np.abs(gate_up[:, size:]) + tried.rounded(tried.want[0]),)


def tanh_softcap(tried: Tried) -> tuple[Allowed, ...]:
    """A quotient, a hyperbolic tangent and a product; the first moves the second by no more than its own roundings.

    Where the first two are too small for a normal number, the cap makes their errors larger.
    """
    small = 2 * max(tried.arguments[1], 1.0) * SMALLEST[tried.dtype]
    return (4 * tried.w * np.abs(tried.want[0]) + tried.rounded(tried.want[0], 3.0) + small,)


def rope(tried: Tried) -> tuple[Allowed, ...]:
    """Two products and their sum in float32, rounded; what is not rotated is moved."""
    x, positions, cos, sin, interleaved = tried.arguments
    turned = (
        definitions.rope(np.abs(x), positions, np.abs(cos), sign * np.abs(sin), interleaved) for sign in (1.0, -1.0)
    )
    allowed = 2 * tried.w * np.maximum(*turned) + tried.rounded(tried.want[0])
    allowed[..., 2 * cos.shape[1] :] = 0.0
    return (allowed,)


def exp(tried: Tried) -> tuple[Allowed, ...]:
    """The argument's last bit moves the result by as much as the argument is large; the function itself by two."""
    x, want = tried.arguments[0], tried.want[0]
    return ((np.where(np.isfinite(x), np.abs(x), 0.0) + 4) * tried.w * np.abs(want) + 2.0**-126,)


def logsumexp(tried: Tried) -> tuple[Allowed, ...]:
    """Exponentials of what is left without the largest entry, their sum, its logarithm and the largest entry."""
    return (_logsumexp(tried)[..., 0],)


def _logsumexp(tried: Tried) -> NumpyArray:
    x = tried.arguments[0]
    top = x.max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    below = np.where(np.isfinite(x), x - top, 0.0)
    shares = np.where(np.isfinite(x), np.exp(below), 0.0)
    total = np.maximum(shares.sum(axis=-1, keepdims=True), 1e-300)
    moved = (shares * np.abs(below)).sum(axis=-1, keepdims=True) / total
    result = np.log(total) + top
    off: NumpyArray = tried.gamma(x.shape[-1]) + tried.w * (moved + 4 + np.abs(top) + np.abs(result))
    return off


def log_softmax(tried: Tried) -> tuple[Allowed, ...]:
    """What the logarithm of the sum may be off by, and one rounding of the difference."""
    want = tried.want[0]
    return (_logsumexp(tried) + tried.w * np.where(np.isfinite(want), np.abs(want), 0.0),)


def cumsum(tried: Tried) -> tuple[Allowed, ...]:
    """Every partial sum is rounded once, by as much as it is large, and all that come before are in the next."""
    partial = np.abs(tried.want[0])
    spread = spread_factor(tried.want[0].size) * np.sqrt(np.cumsum(partial * partial, axis=-1))
    return (tried.w * np.minimum(spread, np.cumsum(partial, axis=-1)),)


def scatter_add(tried: Tried) -> tuple[Allowed, ...]:
    """One rounding for each value added at a place, of no more than all sizes together."""
    x, rows, columns, values = tried.arguments
    with np.errstate(invalid="ignore"):
        sizes = definitions.scatter_add(np.abs(x), rows, columns, np.abs(values))
    count = definitions.scatter_add(np.zeros_like(x), rows, columns, np.ones_like(values))
    return (tried.w * count * np.where(np.isfinite(sizes), sizes, 0.0),)


NOISE = 8.0
"""Roundings of the noise, which the operation promises within a few units in the last place, two roundings each."""


def gumbel(tried: Tried) -> tuple[Allowed, ...]:
    """A few units in the last place; near 0 the outer logarithm's argument is near 1 and keeps only its own."""
    return (NOISE * tried.w * np.maximum(np.abs(tried.want[0]), 1.0),)


def at_most(got: NumpyArray, want: NumpyArray, allowed: Allowed) -> float:
    """The largest difference over what is allowed; infinite where shapes, infinities, NaN or exact results differ."""
    if got.shape != want.shape:
        return math.inf
    if not np.issubdtype(want.dtype, np.floating):
        return 0.0 if np.array_equal(got, want) else math.inf
    finite = np.isfinite(want)
    if not np.array_equal(np.where(finite, 0.0, want), np.where(np.isfinite(got), 0.0, got), equal_nan=True):
        return math.inf
    difference = np.abs(got.astype(np.float64)[finite] - want[finite])
    limit = np.broadcast_to(np.asarray(allowed, np.float64), want.shape)[finite]
    with np.errstate(divide="ignore"):
        excess = np.divide(difference, limit, out=np.zeros_like(difference), where=difference > 0)
    return float(excess.max(initial=0.0))
