"""Linears over dense weights, kept in the type of the activations.

It knows no quantized format: a loader that meets one widens it first, or asks another method.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from cardan.errors import UnsupportedError
from cardan.platform import LinearMethod, LinearSpec, PackedWeight
from cardan.types import TensorView
from cardan_torch.tensors import DENSE_FORMATS, dense_tensor, torch_dtype


class DenseWeight(PackedWeight):
    """A weight as one tensor.

    Attributes:
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]`` in the weight's type, or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight.apply``."""
        return functional.linear(x, self.weight, self.bias)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight.gather``."""
        return functional.embedding(ids, self.weight)


class DenseLinear(LinearMethod):
    """torch's own GEMM for F32, F16 and BF16 weights."""

    name = "dense"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def claims(self, fmt: str, spec: LinearSpec) -> str | None:
        """Dense formats are taken; for all others the reason names them."""
        if fmt in DENSE_FORMATS:
            return None
        return f"{fmt} is a block format, and torch's GEMM takes {', '.join(DENSE_FORMATS)} only"

    def pack(self, views: Sequence[TensorView], spec: LinearSpec, bias: torch.Tensor | None) -> PackedWeight:
        """One tensor in the activations' type; rows are converted view by view into their place.

        Raises:
            UnsupportedError: a view has another format or does not fit.
        """
        weight = torch.empty((spec.out_features, spec.in_features), dtype=torch_dtype(spec.dtype), device=self.device)
        first = 0
        for view in views:
            reason = self.claims(view.dtype, spec)
            if reason is not None:
                raise UnsupportedError(f"{view.name} cannot be packed for {spec.name}: {reason}. Widen it first.")
            rows = view.num_elements // spec.in_features
            weight[first : first + rows] = dense_tensor(view).reshape(rows, spec.in_features)
            first += rows
        if first != spec.out_features:
            raise UnsupportedError(
                f"{spec.name} needs {spec.out_features} rows, but its tensors have {first}. Check the model's config."
            )
        return self.make(weight, None if bias is None else bias.to(weight.dtype))

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """Wrap a packed tensor; a device with a better GEMM overrides this."""
        return DenseWeight(weight, bias)
