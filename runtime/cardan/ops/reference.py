"""``ReferenceOps``: the ops table in numpy, in float64 unless told otherwise; the oracle of the tests.

It knows no device and makes no effort to be fast. Every float array has the one type it was made with, whatever
type is asked for, so that its results carry no rounding of a narrower one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cardan.ops import definitions, philox
from cardan.ops.definitions import NumpyArray
from cardan.ops.table import Ops

FLOAT_DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A weight that ``ReferenceOps`` takes as packed.

    Attributes:
        values: ``[out_features, in_features]``.
        bias: ``[out_features]``, or None.
    """

    values: NumpyArray
    bias: NumpyArray | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of values and bias."""
        return int(self.values.nbytes) + (0 if self.bias is None else int(self.bias.nbytes))

    def apply(self, x: NumpyArray) -> NumpyArray:
        """``x @ values.T + bias``."""
        out = definitions.linear(x, self.values)
        return out if self.bias is None else out + self.bias

    def gather(self, ids: NumpyArray) -> NumpyArray:
        """Rows ``ids`` of the values."""
        return self.values[ids]


class ReferenceOps(Ops):
    """Every op on numpy arrays of one float type."""

    def __init__(self, dtype: str = "float64") -> None:
        if dtype not in ("float64", "float32"):
            raise ValueError(f"ReferenceOps computes in float64 or float32, got {dtype!r}. Pass one of these.")
        self.dtype = np.dtype(dtype)

    def pack(self, values: NumpyArray, bias: NumpyArray | None = None) -> DenseWeight:
        """A packed weight from dense ``values: [out, in]`` and ``bias: [out]``."""
        return DenseWeight(values.astype(self.dtype), None if bias is None else bias.astype(self.dtype))

    def from_host(self, array: NumpyArray, dtype: str | None = None) -> NumpyArray:
        """A copy; floats come in this table's type."""
        if np.issubdtype(array.dtype, np.floating) or dtype in FLOAT_DTYPES:
            return array.astype(self.dtype)
        return array.astype(dtype) if dtype else array.copy()

    def to_host(self, x: NumpyArray) -> NumpyArray:
        """A copy."""
        return x.copy()

    def cast(self, x: NumpyArray, dtype: str) -> NumpyArray:
        """Any float type becomes this table's."""
        return x.astype(self.dtype if dtype in FLOAT_DTYPES else dtype)

    def embed(self, ids: NumpyArray, table: Any) -> NumpyArray:
        """See ``Ops.embed``."""
        rows: NumpyArray = table.gather(ids)
        return rows

    def linear(self, x: NumpyArray, weight: Any) -> NumpyArray:
        """See ``Ops.linear``."""
        out: NumpyArray = weight.apply(x)
        return out

    def add(self, a: NumpyArray, b: NumpyArray) -> NumpyArray:
        """See ``Ops.add``."""
        return a + b

    def mul(self, a: NumpyArray, b: NumpyArray) -> NumpyArray:
        """See ``Ops.mul``."""
        return a * b

    def scale(self, x: NumpyArray, factor: float) -> NumpyArray:
        """See ``Ops.scale``."""
        out: NumpyArray = x * x.dtype.type(factor)
        return out

    def rms_norm(self, x: NumpyArray, weight: NumpyArray, eps: float) -> NumpyArray:
        """See ``Ops.rms_norm``."""
        return definitions.rms_norm(x, weight, eps)

    def layer_norm(self, x: NumpyArray, weight: NumpyArray, bias: NumpyArray | None, eps: float) -> NumpyArray:
        """See ``Ops.layer_norm``."""
        return definitions.layer_norm(x, weight, bias, eps)

    def silu(self, x: NumpyArray) -> NumpyArray:
        """See ``Ops.silu``."""
        return definitions.silu(x)

    def gelu(self, x: NumpyArray, approximate: bool) -> NumpyArray:
        """See ``Ops.gelu``."""
        return definitions.gelu(x, approximate)

    def tanh_softcap(self, x: NumpyArray, cap: float) -> NumpyArray:
        """See ``Ops.tanh_softcap``."""
        return definitions.tanh_softcap(x, cap)

    def rope(
        self, x: NumpyArray, positions: NumpyArray, cos: NumpyArray, sin: NumpyArray, interleaved: bool
    ) -> NumpyArray:
        """See ``Ops.rope``."""
        return definitions.rope(x, positions, cos, sin, interleaved)

    def split(self, x: NumpyArray, sizes: Sequence[int]) -> tuple[NumpyArray, ...]:
        """See ``Ops.split``."""
        return definitions.split(x, sizes)

    def concat(self, xs: Sequence[NumpyArray]) -> NumpyArray:
        """See ``Ops.concat``."""
        return np.concatenate(xs, axis=-1)

    def split_heads(self, x: NumpyArray, heads: int) -> NumpyArray:
        """See ``Ops.split_heads``."""
        return definitions.split_heads(x, heads)

    def merge_heads(self, x: NumpyArray) -> NumpyArray:
        """See ``Ops.merge_heads``."""
        return definitions.merge_heads(x)

    def reshape(self, x: NumpyArray, shape: tuple[int, ...]) -> NumpyArray:
        """See ``Ops.reshape``."""
        return x.reshape(shape)

    def gather_rows(self, x: NumpyArray, index: NumpyArray) -> NumpyArray:
        """See ``Ops.gather_rows``."""
        return x[index]

    def permute_columns(self, x: NumpyArray, order: NumpyArray) -> NumpyArray:
        """See ``Ops.permute_columns``."""
        return x[:, order]

    def scatter_rows(self, x: NumpyArray, index: NumpyArray, values: NumpyArray) -> NumpyArray:
        """See ``Ops.scatter_rows``."""
        return definitions.scatter_rows(x, index, values)

    def where(self, condition: NumpyArray, a: NumpyArray, b: NumpyArray | float) -> NumpyArray:
        """See ``Ops.where``."""
        return definitions.where(condition, a, b)

    def compare(self, a: NumpyArray, relation: str, b: NumpyArray | float) -> NumpyArray:
        """See ``Ops.compare``."""
        return definitions.compare(a, relation, b)

    def arithmetic(self, a: NumpyArray, operation: str, b: NumpyArray | float) -> NumpyArray:
        """See ``Ops.arithmetic``."""
        return definitions.arithmetic(a, operation, b)

    def is_nan(self, x: NumpyArray) -> NumpyArray:
        """See ``Ops.is_nan``."""
        return definitions.is_nan(x)

    def log_softmax(self, x: NumpyArray) -> NumpyArray:
        """See ``Ops.log_softmax``."""
        return definitions.log_softmax(x)

    def logsumexp(self, x: NumpyArray) -> NumpyArray:
        """See ``Ops.logsumexp``."""
        return definitions.logsumexp(x)

    def argmax(self, x: NumpyArray) -> NumpyArray:
        """See ``Ops.argmax``."""
        return definitions.argmax(x)

    def topk(self, x: NumpyArray, k: int) -> tuple[NumpyArray, NumpyArray]:
        """See ``Ops.topk``."""
        return definitions.topk(x, k)

    def cumsum(self, x: NumpyArray) -> NumpyArray:
        """See ``Ops.cumsum``."""
        return definitions.cumsum(x)

    def exp(self, x: NumpyArray) -> NumpyArray:
        """See ``Ops.exp``."""
        return np.exp(x)

    def take_columns(self, x: NumpyArray, index: NumpyArray) -> NumpyArray:
        """See ``Ops.take_columns``."""
        return np.take_along_axis(x, index.astype(np.int64), axis=-1)

    def scatter_add(self, x: NumpyArray, rows: NumpyArray, columns: NumpyArray, values: NumpyArray) -> NumpyArray:
        """See ``Ops.scatter_add``."""
        return definitions.scatter_add(x, rows, columns, values)

    def unpack_bits(self, mask: NumpyArray, columns: int) -> NumpyArray:
        """See ``Ops.unpack_bits``."""
        return definitions.unpack_bits(mask, columns)

    def gumbel(self, seeds: NumpyArray, positions: NumpyArray, ids: NumpyArray | int) -> NumpyArray:
        """See ``Ops.gumbel``."""
        return philox.gumbel(seeds, positions, ids).astype(self.dtype)
