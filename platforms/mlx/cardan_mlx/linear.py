"""Linears over dense weights, kept in the type of the activations.

It knows no quantized format: ``cardan_mlx.affine`` takes those that MLX can multiply.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from cardan.errors import UnsupportedError
from cardan.platform import LinearMethod, LinearSpec, PackedWeight
from cardan.types import TensorView
from cardan_mlx.arrays import DENSE_FORMATS, dense_array, mlx_dtype


class DenseWeight(PackedWeight):
    """A weight as one array.

    Attributes:
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]`` in the weight's type, or None.
    """

    def __init__(self, weight: mx.array, bias: mx.array | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return int(self.weight.nbytes) + (0 if self.bias is None else int(self.bias.nbytes))

    def apply(self, x: mx.array) -> mx.array:
        """See ``PackedWeight.apply``."""
        if self.bias is None:
            return x @ self.weight.T
        return mx.addmm(self.bias, x, self.weight.T)

    def gather(self, ids: mx.array) -> mx.array:
        """See ``PackedWeight.gather``."""
        return mx.take(self.weight, ids, axis=0)


class DenseLinear(LinearMethod):
    """MLX's own GEMM for F32, F16 and BF16 weights."""

    name = "dense"

    def claims(self, fmt: str, spec: LinearSpec) -> str | None:
        """Dense formats are taken; for all others the reason names them."""
        if fmt in DENSE_FORMATS:
            return None
        return f"{fmt} is no dense format, and this GEMM takes {', '.join(DENSE_FORMATS)} only"

    def pack(self, views: Sequence[TensorView], spec: LinearSpec, bias: mx.array | None) -> PackedWeight:
        """One array in the activations' type, evaluated at once so that no view is held.

        Raises:
            UnsupportedError: a view has another format, or the views do not fit.
        """
        dtype = mlx_dtype(spec.dtype)
        parts = []
        for view in views:
            reason = self.claims(view.dtype, spec)
            if reason is not None:
                raise UnsupportedError(f"{view.name} cannot be packed for {spec.name}: {reason}. Widen it first.")
            part = dense_array(view).reshape(-1, spec.in_features).astype(dtype)
            mx.eval(part)
            parts.append(part)
        weight = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
        mx.eval(weight)
        check_rows(spec, int(weight.shape[0]))
        return DenseWeight(weight, None if bias is None else bias.astype(dtype))


def check_rows(spec: LinearSpec, rows: int) -> None:
    """Make sure that the rows of a weight are all there.

    Raises:
        UnsupportedError: they are not.
    """
    if rows != spec.out_features:
        raise UnsupportedError(
            f"{spec.name} needs {spec.out_features} rows, but its tensors have {rows}. Check the model's config."
        )
