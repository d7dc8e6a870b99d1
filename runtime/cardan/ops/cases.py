"""Arguments on which every platform's operations are tried: odd shapes, ties, infinities, repeated places.

It knows no platform; arguments are numpy in float64, or float32 where an operation only takes that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from cardan.ops.definitions import NumpyArray
from cardan.ops.reference import DenseWeight

Arguments: TypeAlias = tuple[Any, ...]
Cases: TypeAlias = Callable[[np.random.Generator], Iterator[Arguments]]

ROWS_AND_COLUMNS = ((1, 1), (1, 64), (3, 7), (17, 33), (5, 100), (2, 1000))
TOKENS_HEADS_DIM = ((1, 1, 2), (3, 5, 6), (17, 3, 64), (4, 9, 80))


def rows(rng: np.random.Generator) -> Iterator[Arguments]:
    """One array ``[rows, columns]`` with small and large entries."""
    for shape in ROWS_AND_COLUMNS:
        yield (rng.normal(size=shape) * 4.0,)
    yield (np.array([[0.0, -0.0, 1e-6, -40.0, 40.0]]),)


def pairs(rng: np.random.Generator) -> Iterator[Arguments]:
    """Two arrays of one shape, or of which the second lacks the leading axis."""
    for shape in ROWS_AND_COLUMNS:
        yield rng.normal(size=shape), rng.normal(size=shape)
        yield rng.normal(size=shape), rng.normal(size=shape[1:])


def with_value(*values: Any) -> Cases:
    """Arrays of ``rows``, each with one of the values in turn."""

    def generate(rng: np.random.Generator) -> Iterator[Arguments]:
        for index, (x,) in enumerate(rows(rng)):
            yield x, values[index % len(values)]

    return generate


def norms(rng: np.random.Generator) -> Iterator[Arguments]:
    """``x``, its weight and eps; rows of zeros and of large entries, and heads apart."""
    for shape in (*ROWS_AND_COLUMNS, *TOKENS_HEADS_DIM):
        yield rng.normal(size=shape) * 3.0, rng.normal(size=shape[-1]), 1e-5
    yield np.zeros((2, 9)), np.ones(9), 1e-6
    yield rng.normal(size=(2, 65)) * 200.0, rng.normal(size=65), 1e-6


def layer_norms(rng: np.random.Generator) -> Iterator[Arguments]:
    """``x``, weight, bias or None, eps."""
    for index, (x, weight, eps) in enumerate(norms(rng)):
        yield x, weight, rng.normal(size=x.shape[-1]) if index % 2 else None, eps


def residual_norms(rng: np.random.Generator) -> Iterator[Arguments]:
    """``x``, residual, weight, eps."""
    for x, weight, eps in norms(rng):
        yield x, rng.normal(size=x.shape), weight, eps


def weights(rng: np.random.Generator, with_bias: bool) -> Iterator[DenseWeight]:
    """Packed weights ``[out, in]``; the input width is not always a multiple of 32."""
    for out_features, in_features in ((1, 1), (7, 33), (64, 96), (130, 65), (48, 576)):
        values = rng.normal(size=(out_features, in_features)) / np.sqrt(in_features)
        yield DenseWeight(values, None)
        if with_bias:
            yield DenseWeight(values, rng.normal(size=out_features))


def embeddings(rng: np.random.Generator) -> Iterator[Arguments]:
    """Ids, repeated ones among them, and a table."""
    for table in weights(rng, with_bias=False):
        yield rng.integers(0, table.values.shape[0], 5).astype(np.int32), table


def linears(rng: np.random.Generator) -> Iterator[Arguments]:
    """``x`` of one and of several rows, and a weight."""
    for weight in weights(rng, with_bias=True):
        for tokens in (1, 3, 17):
            yield rng.normal(size=(tokens, weight.values.shape[1])), weight


def residual_linears(rng: np.random.Generator) -> Iterator[Arguments]:
    """The same, and a residual: as large as the product, then much smaller and much larger."""
    for index, (x, weight) in enumerate(linears(rng)):
        residual = rng.normal(size=(len(x), len(weight.values)))
        yield x, weight, residual * (1.0, 0.01, 30.0)[index % 3]


def rotations(rng: np.random.Generator) -> Iterator[Arguments]:
    """Heads, positions out of order, tables narrower than the head or as wide, both pairings."""
    for tokens, heads, dim in TOKENS_HEADS_DIM:
        for half in {dim // 2, max(dim // 4, 1)}:
            angles = rng.uniform(0.0, 6.0, size=(50, half))
            for interleaved in (False, True):
                positions = rng.integers(0, 50, tokens).astype(np.int32)
                yield rng.normal(size=(tokens, heads, dim)), positions, np.cos(angles), np.sin(angles), interleaved


def splits(rng: np.random.Generator) -> Iterator[Arguments]:
    """An array and sizes that add up to its last axis."""
    for sizes in ((1,), (3, 5), (64, 16, 16), (7, 1, 2, 9)):
        yield rng.normal(size=(4, sum(sizes))), sizes


def joins(rng: np.random.Generator) -> Iterator[Arguments]:
    """Arrays whose last axes are joined."""
    for sizes in ((4,), (3, 5), (64, 16, 1)):
        yield ([rng.normal(size=(3, size)) for size in sizes],)


def flat_heads(rng: np.random.Generator) -> Iterator[Arguments]:
    """``[tokens, heads * dim]`` and the number of heads."""
    for tokens, heads, dim in TOKENS_HEADS_DIM:
        yield rng.normal(size=(tokens, heads * dim)), heads


def heads(rng: np.random.Generator) -> Iterator[Arguments]:
    """``[tokens, heads, dim]``."""
    for shape in TOKENS_HEADS_DIM:
        yield (rng.normal(size=shape),)


def reshapes(rng: np.random.Generator) -> Iterator[Arguments]:
    """Shapes with and without an open size."""
    yield rng.normal(size=(6, 4)), (3, 8)
    yield rng.normal(size=(6, 4)), (-1,)
    yield rng.normal(size=(5,)), (5, -1)


def gathers(rng: np.random.Generator) -> Iterator[Arguments]:
    """Rows in any order, repeated, of two and three axes."""
    for shape in ((5, 7), (3, 2, 4), (1, 1)):
        yield rng.normal(size=shape), rng.integers(0, shape[0], 6).astype(np.int32)


def permutations(rng: np.random.Generator) -> Iterator[Arguments]:
    """Columns in another order."""
    for tokens, features in ((5, 7), (1, 1), (3, 160)):
        yield rng.normal(size=(tokens, features)), rng.permutation(features).astype(np.int32)


def scatters(rng: np.random.Generator) -> Iterator[Arguments]:
    """Rows that are replaced, each once."""
    for shape in ((5, 7), (3, 2, 4), (1, 1)):
        index = rng.permutation(shape[0])[: max(1, shape[0] // 2)].astype(np.int32)
        yield rng.normal(size=shape), index, rng.normal(size=(len(index), *shape[1:]))


def logits(rng: np.random.Generator) -> Iterator[Arguments]:
    """Float32 rows as samplers see them: ties, and entries of ``-inf``, but never a whole row of them."""
    for shape in ROWS_AND_COLUMNS:
        yield (_logits(rng, shape),)
    masked = _logits(rng, (4, 50))
    masked[:, 3:40] = -np.inf
    yield (masked,)


def _logits(rng: np.random.Generator, shape: tuple[int, ...]) -> NumpyArray:
    """Coarse values, so that ties occur."""
    return (np.round(rng.normal(size=shape) * 8.0) / 4.0).astype(np.float32)


def conditions(rng: np.random.Generator) -> Iterator[Arguments]:
    """A condition, an array, and an array or a number."""
    for shape in ROWS_AND_COLUMNS:
        condition = rng.random(shape) < 0.5
        yield condition, _logits(rng, shape), _logits(rng, shape)
        yield condition, _logits(rng, shape), float("-inf")


def operators(*names: str) -> Cases:
    """An array, an operator, and an array, a column or a number that is never zero."""

    def generate(rng: np.random.Generator) -> Iterator[Arguments]:
        for name in names:
            for shape in ((1, 1), (3, 7), (2, 100)):
                for right in (_logits(rng, shape), _logits(rng, (shape[0], 1)), 0.75):
                    yield _logits(rng, shape), name, right if isinstance(right, float) else right + np.float32(9.125)
            same = _logits(rng, (3, 5))
            yield same + np.float32(10), name, same + np.float32(10)

    return generate


def nans(rng: np.random.Generator) -> Iterator[Arguments]:
    """Rows without and with a NaN, infinities among them."""
    x = _logits(rng, (5, 33))
    x[1, 32] = np.nan
    x[3, 0] = np.nan
    x[4, 5] = -np.inf
    yield (x,)


def topks(rng: np.random.Generator) -> Iterator[Arguments]:
    """Rows with ties and a ``k`` from one to all."""
    for shape in ROWS_AND_COLUMNS:
        for k in sorted({1, min(5, shape[1]), shape[1]}):
            yield _logits(rng, shape), k


def probabilities(rng: np.random.Generator) -> Iterator[Arguments]:
    """Rows that add up to one."""
    for shape in ROWS_AND_COLUMNS:
        x = rng.random(shape)
        yield ((x / x.sum(axis=-1, keepdims=True)).astype(np.float32),)


def columns(rng: np.random.Generator) -> Iterator[Arguments]:
    """Columns of each row, in any order, repeated."""
    for shape in ROWS_AND_COLUMNS:
        yield _logits(rng, shape), rng.integers(0, shape[1], (shape[0], 4)).astype(np.int32)


def sparse_sums(rng: np.random.Generator) -> Iterator[Arguments]:
    """Places, one of them twice, and what is added there; also no place at all."""
    for shape in ROWS_AND_COLUMNS:
        where = [rng.integers(0, size, 6).astype(np.int32) for size in shape]
        for index in where:
            index[1] = index[0]
        yield _logits(rng, shape), *where, _logits(rng, (6,))
    none = np.zeros(0, np.int32)
    yield _logits(rng, (2, 3)), none, none, np.zeros(0, np.float32)


def masks(rng: np.random.Generator) -> Iterator[Arguments]:
    """Packed words, the sign bit among them, for widths around multiples of 32."""
    for width in (1, 31, 32, 33, 1000):
        words = rng.integers(-(2**31), 2**31, (3, (width + 31) // 32), dtype=np.int64).astype(np.int32)
        yield words, width


def noises(rng: np.random.Generator) -> Iterator[Arguments]:
    """Seeds of all 64 bits, positions, and all ids or named ones."""
    seeds = rng.integers(0, 2**64, 3, dtype=np.uint64)
    positions = np.array([0, 5, 131071], np.int32)
    yield seeds, positions, 1001
    yield seeds, positions, rng.integers(0, 200_000, (3, 9)).astype(np.int32)


def gated(*values: Any) -> Cases:
    """``[tokens, 2 * size]``, the size, and further values."""

    def generate(rng: np.random.Generator) -> Iterator[Arguments]:
        for tokens, size in ROWS_AND_COLUMNS:
            yield rng.normal(size=(tokens, 2 * size)) * 2.0, size, *values

    return generate


def host_arrays(rng: np.random.Generator) -> Iterator[Arguments]:
    """Arrays of every kind that crosses to the device, with no type asked for."""
    yield rng.normal(size=(3, 5)).astype(np.float32), None
    yield rng.integers(-5, 5, (4,)).astype(np.int32), None
    yield rng.random((2, 3)) < 0.5, None
    yield rng.normal(size=(3, 5)).astype(np.float32), "float32"
