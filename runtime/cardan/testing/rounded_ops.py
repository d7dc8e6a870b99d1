"""The reference operations with every result rounded to a narrower type: how far a model's logits move by rounding.

They know no device: what is rounded are weights, and each operation's result once.
"""

from __future__ import annotations

from typing import Any

from cardan.ops import DenseWeight, ReferenceOps, round_to
from cardan.ops.definitions import NumpyArray


class RoundedOps(ReferenceOps):
    """Computes in float32 and rounds to ``dtype``; to float32 itself nothing more is rounded."""

    def __init__(self, dtype: str) -> None:
        super().__init__("float32")
        self._type = dtype

    def narrow(self, x: NumpyArray) -> NumpyArray:
        """``x`` with values that the type holds, in float32."""
        return x if self._type == "float32" else round_to(x, self._type).astype(self.dtype)

    def pack(self, values: NumpyArray, bias: NumpyArray | None = None) -> DenseWeight:
        """A weight in the type."""
        packed = super().pack(values, bias)
        return DenseWeight(self.narrow(packed.values), None if packed.bias is None else self.narrow(packed.bias))

    def from_host(self, array: NumpyArray, dtype: str | None = None) -> NumpyArray:
        """A copy; what comes in the activations' type is rounded to it."""
        copied = super().from_host(array, dtype)
        return self.narrow(copied) if dtype is None and copied.dtype == self.dtype else copied

    def linear(self, x: NumpyArray, weight: Any) -> NumpyArray:
        """See ``Ops.linear``."""
        return self.narrow(super().linear(x, weight))

    def add(self, a: NumpyArray, b: NumpyArray) -> NumpyArray:
        """See ``Ops.add``."""
        return self.narrow(super().add(a, b))

    def mul(self, a: NumpyArray, b: NumpyArray) -> NumpyArray:
        """See ``Ops.mul``."""
        return self.narrow(super().mul(a, b))

    def scale(self, x: NumpyArray, factor: float) -> NumpyArray:
        """See ``Ops.scale``."""
        return self.narrow(super().scale(x, factor))

    def rms_norm(self, x: NumpyArray, weight: NumpyArray, eps: float) -> NumpyArray:
        """See ``Ops.rms_norm``."""
        return self.narrow(super().rms_norm(x, weight, eps))

    def layer_norm(self, x: NumpyArray, weight: NumpyArray, bias: NumpyArray | None, eps: float) -> NumpyArray:
        """See ``Ops.layer_norm``."""
        return self.narrow(super().layer_norm(x, weight, bias, eps))

    def silu(self, x: NumpyArray) -> NumpyArray:
        """See ``Ops.silu``."""
        return self.narrow(super().silu(x))

    def gelu(self, x: NumpyArray, approximate: bool) -> NumpyArray:
        """See ``Ops.gelu``."""
        return self.narrow(super().gelu(x, approximate))

    def tanh_softcap(self, x: NumpyArray, cap: float) -> NumpyArray:
        """See ``Ops.tanh_softcap``."""
        return self.narrow(super().tanh_softcap(x, cap))

    def rope(
        self, x: NumpyArray, positions: NumpyArray, cos: NumpyArray, sin: NumpyArray, interleaved: bool
    ) -> NumpyArray:
        """See ``Ops.rope``."""
        return self.narrow(super().rope(x, positions, cos, sin, interleaved))
