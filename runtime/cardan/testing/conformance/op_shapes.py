"""Arguments beyond those of the specs: empty batches, long rows, odd inner sizes, NaN in one row, infinities.

It knows no platform. What an operation's axes mean is read from its spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from cardan.ops import DenseWeight, OpSpec
from cardan.ops.definitions import NumpyArray
from cardan.ops.opspec import Role
from cardan.testing.conformance.check import NotApplicableError

Arguments: TypeAlias = tuple[Any, ...]

INNER_SIZES = (1, 2, 3, 7, 8, 31, 32, 33, 47, 63, 64, 65, 96, 97, 127, 129, 160, 257)
"""Columns of weights: 1, primes, and the neighbours of multiples of 8, 32 and 64."""

OUTER_SIZES = (1, 5, 31, 64, 67)
LONG_ROW = 50_001
QUICK_LONG_ROW = 8_191

_BATCH_AXES = {"scatter_rows": "n", "scatter_add": "m"}
"""Axis that may be empty, where it is not the first one of the result."""

_WHOLE = frozenset({"reshape"})
"""Operations without a batch axis."""

_ROWS_MIX = frozenset({"gather_rows", "scatter_rows", "scatter_add", "reshape", "embed", "unpack_bits", "gumbel"})
"""Operations whose rows are not each a function of the same row of the first argument, or that take no floats."""


def empty_case(spec: OpSpec, rng: np.random.Generator) -> Arguments:
    """The first case of a spec with no rows.

    Raises:
        NotApplicableError: the operation has no batch axis.
    """
    if spec.name in _WHOLE:
        raise NotApplicableError("the operation has no batch axis")
    axis = _BATCH_AXES.get(spec.name, spec.outputs[0].split()[0])
    arguments = next(case for case in spec.cases(rng) if _has_rows(case))
    emptied = []
    rank = max(np.ndim(item) for item in arguments if isinstance(item, np.ndarray | list))
    for argument, item in zip(arguments, spec.inputs, strict=True):
        first = item.axes.split()[:1]
        full = not isinstance(argument, np.ndarray) or axis != "..." or argument.ndim == rank
        emptied.append(_no_rows(argument) if first == [axis] and full else argument)
    return tuple(emptied)


def _has_rows(arguments: Arguments) -> bool:
    return any(isinstance(item, list) or (isinstance(item, np.ndarray) and item.ndim > 0) for item in arguments)


def _no_rows(argument: Any) -> Any:
    if isinstance(argument, list):
        return [part[:0] for part in argument]
    return argument[:0] if isinstance(argument, np.ndarray) else argument


def long_cases(spec: OpSpec, rng: np.random.Generator, *, quick: bool) -> Iterator[Arguments]:
    """Long rows for what samplers do over a vocabulary, and all kinds of inner sizes for linears."""
    width = QUICK_LONG_ROW if quick else LONG_ROW
    make = _LONG.get(spec.name)
    if make is not None:
        yield from make(rng, width)


def _linears(rng: np.random.Generator, width: int) -> Iterator[Arguments]:
    for index, columns in enumerate(INNER_SIZES):
        rows = OUTER_SIZES[index % len(OUTER_SIZES)]
        weight = DenseWeight(rng.normal(size=(rows, columns)) / np.sqrt(columns), rng.normal(size=rows))
        for tokens in (1, 2, 9):
            yield rng.normal(size=(tokens, columns)), weight
    yield rng.normal(size=(3, 2048)), DenseWeight(rng.normal(size=(33, 2048)) / 45.0, None)
    yield rng.normal(size=(67, 64)), DenseWeight(rng.normal(size=(1031, 64)) / 8.0, None)


def _residual_linears(rng: np.random.Generator, width: int) -> Iterator[Arguments]:
    for x, weight in _linears(rng, width):
        yield x, weight, rng.normal(size=(len(x), len(weight.values)))


def _logits(rng: np.random.Generator, width: int) -> NumpyArray:
    return (np.round(rng.normal(size=(3, width)) * 64.0) / 16.0).astype(np.float32)


def _rows(rng: np.random.Generator, width: int) -> Iterator[Arguments]:
    yield (_logits(rng, width),)


def _topks(rng: np.random.Generator, width: int) -> Iterator[Arguments]:
    for k in (1, 2, 64, 257):
        yield _logits(rng, width), k


def _shares(rng: np.random.Generator, width: int) -> Iterator[Arguments]:
    shares = rng.random((2, 4096))
    yield ((shares / shares.sum(axis=-1, keepdims=True)).astype(np.float32),)


def _norms(rng: np.random.Generator, width: int) -> Iterator[Arguments]:
    yield rng.normal(size=(3, 4097)), rng.normal(size=4097), 1e-5


_LONG: Mapping[str, Callable[[np.random.Generator, int], Iterator[Arguments]]] = {
    "linear": _linears,
    "linear_add": _residual_linears,
    "linear_float32": _linears,
    "log_softmax": _rows,
    "logsumexp": _rows,
    "argmax": _rows,
    "is_nan": _rows,
    "exp": _rows,
    "topk": _topks,
    "cumsum": _shares,
    "rms_norm": _norms,
}


def rows_with_nan(spec: OpSpec, rng: np.random.Generator) -> Iterator[Arguments]:
    """A case in which one row of the first array holds NaN: the other rows must not show it."""
    first = spec.inputs[0]
    if spec.name in _ROWS_MIX or first.role not in (Role.ACTIVATION, Role.FLOAT32):
        return
    for arguments in spec.cases(rng):
        x = arguments[0]
        if not isinstance(x, np.ndarray) or x.ndim < 2 or len(x) < 3 or not np.issubdtype(x.dtype, np.floating):
            continue
        poisoned = x.copy()
        poisoned[1] = np.nan
        if spec.name not in ("topk", "argmax", "compare"):
            yield (poisoned, *arguments[1:])
            return


_INFINITE = np.array([[0.0, -np.inf, 1.5, -2.0], [np.inf, 0.5, -np.inf, 3.0], [1.0, 2.0, 3.0, 4.0]], np.float32)
_FORBIDDEN = np.array([[0.0, -np.inf, 1.5, -np.inf], [-np.inf, 0.5, -np.inf, -3.0]], np.float32)
_SPECIAL: Mapping[str, tuple[Arguments, ...]] = {
    "to_host": ((_INFINITE.astype(np.float64),),),
    "from_host": ((np.where(_INFINITE == 3.0, np.nan, _INFINITE), None),),
    "cast": ((_INFINITE.astype(np.float64), "float32"),),
    "exp": ((_INFINITE,),),
    "is_nan": ((_INFINITE,),),
    "argmax": ((_INFINITE,), (_FORBIDDEN,)),
    "topk": ((_INFINITE, 2), (_FORBIDDEN, 4)),
    "compare": ((_INFINITE, ">", float("-inf")), (np.where(_INFINITE == 3.0, np.nan, _INFINITE), ">=", 1.0)),
    "where": ((_INFINITE > 0, _INFINITE, float("-inf")),),
    "log_softmax": ((_FORBIDDEN,),),
    "logsumexp": ((_FORBIDDEN,), (np.full((2, 5), -np.inf, np.float32),)),
    "tanh_softcap": ((_INFINITE.astype(np.float64), 30.0),),
    "gather_rows": ((np.where(_INFINITE == 3.0, np.nan, _INFINITE).astype(np.float64), np.array([2, 0, 2], np.int32)),),
    "take_columns": ((_INFINITE, np.array([[1, 1], [0, 3], [2, 0]], np.int32)),),
    "scatter_add": (
        (_FORBIDDEN, np.array([0, 1], np.int32), np.array([2, 1], np.int32), np.array([-np.inf, 1.0], np.float32)),
    ),
}


def special_values(spec: OpSpec) -> tuple[Arguments, ...]:
    """Infinities and NaN for the operations that meet them in a sampler or on the way to the host."""
    return _SPECIAL.get(spec.name, ())
