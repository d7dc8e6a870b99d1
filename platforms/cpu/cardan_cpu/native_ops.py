"""``NativeOps``: the ops table on the tensors of ``cardan_native``, computed at once on the cores of this machine.

It knows no model and does not import torch; packed weights bring their own products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cardan.ops import Ops
from cardan_cpu.native_linear import NativeWeight
from cardan_native import Kernels, Tensor, to_array, to_tensor

_HOST_TYPES: dict[np.dtype[Any], Any] = {np.dtype(np.float64): np.float32, np.dtype(np.int64): np.int32}
"""What arrays become that no kernel takes as they are."""

_NUMPY_TYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "int32": np.int32, "bool": np.bool_}
"""Types of the table that numpy converts to; bfloat16 it lacks."""


class NativeOps(Ops):
    """Every op as one call of a kernel."""

    def __init__(self, native: Kernels) -> None:
        """Take the kernels of one variant."""
        self.native = native

    # --- host and device ---

    def from_host(self, array: np.ndarray[Any, Any], dtype: str | None = None) -> Tensor:
        """See ``Ops.from_host``; float64 and int64 arrive in 32 bits."""
        asked = _NUMPY_TYPES[dtype] if dtype in _NUMPY_TYPES else _HOST_TYPES.get(array.dtype)
        if dtype == "bfloat16":
            return self.native.cast(to_tensor(self.native, np.asarray(array, dtype=np.float32)), dtype)
        return to_tensor(self.native, array if asked is None else np.asarray(array, dtype=asked))

    def to_host(self, x: Tensor) -> np.ndarray[Any, Any]:
        """See ``Ops.to_host``."""
        return to_array(x)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """See ``Ops.cast``."""
        return self.native.cast(x, dtype)

    # --- layers ---

    def embed(self, ids: Tensor, table: Any) -> Tensor:
        """See ``Ops.embed``."""
        rows: Tensor = table.gather(ids)
        return rows

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        """See ``Ops.linear``."""
        out: Tensor = weight.apply(x)
        return out

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """See ``Ops.add``; the result has ``a``'s type."""
        return self.native.add(a, self._like(b, a))

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """See ``Ops.mul``; the result has ``a``'s type."""
        return self.native.mul(a, self._like(b, a))

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """See ``Ops.scale``."""
        return self.native.scale(x, factor)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``Ops.rms_norm``."""
        return self.native.rms_norm(x, self._wide(weight), eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """See ``Ops.layer_norm``."""
        return self.native.layer_norm(x, self._wide(weight), None if bias is None else self._wide(bias), eps)

    def silu(self, x: Tensor) -> Tensor:
        """See ``Ops.silu``."""
        return self.native.silu(x)

    def gelu(self, x: Tensor, approximate: bool) -> Tensor:
        """See ``Ops.gelu``."""
        return self.native.gelu(x, approximate)

    def tanh_softcap(self, x: Tensor, cap: float) -> Tensor:
        """See ``Ops.tanh_softcap``."""
        return self.native.tanh_softcap(x, cap)

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """See ``Ops.rope``; the kernel reads the tables' rows itself, so ``rope_prepare`` has nothing to gather."""
        return self.native.rope(x, positions, cos, sin, interleaved)

    def split(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """See ``Ops.split``; the pieces are views."""
        pieces, start = [], 0
        for size in sizes:
            pieces.append(x.columns(start, size))
            start += size
        if start != x.shape[-1]:
            raise ValueError(f"sizes must add up to {x.shape[-1]}, the last axis of x, got {list(sizes)}.")
        return tuple(pieces)

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        """See ``Ops.concat``."""
        return self.native.concat(list(xs))

    def split_heads(self, x: Tensor, heads: int) -> Tensor:
        """See ``Ops.split_heads``; a view."""
        return x.split_heads(heads)

    def merge_heads(self, x: Tensor) -> Tensor:
        """See ``Ops.merge_heads``."""
        return x.merge_heads()

    def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """See ``Ops.reshape``."""
        return x.reshaped(shape)

    def gather_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """See ``Ops.gather_rows``."""
        return self.native.gather_rows(x, index)

    def scatter_rows(self, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        """See ``Ops.scatter_rows``; changes ``x`` in place."""
        return self.native.scatter_rows(x, index, self._like(values, x))

    # --- logits and sampling ---

    def where(self, condition: Tensor, a: Tensor, b: Tensor | float) -> Tensor:
        """See ``Ops.where``; the result has ``a``'s type."""
        return self.native.where(condition, a, b)

    def compare(self, a: Tensor, relation: str, b: Tensor | float) -> Tensor:
        """See ``Ops.compare``."""
        return self.native.compare(a, relation, b)

    def arithmetic(self, a: Tensor, operation: str, b: Tensor | float) -> Tensor:
        """See ``Ops.arithmetic``."""
        return self.native.arithmetic(a, operation, b)

    def is_nan(self, x: Tensor) -> Tensor:
        """See ``Ops.is_nan``."""
        return self.native.is_nan(x)

    def log_softmax(self, x: Tensor) -> Tensor:
        """See ``Ops.log_softmax``."""
        return self.native.log_softmax(x)

    def logsumexp(self, x: Tensor) -> Tensor:
        """See ``Ops.logsumexp``."""
        return self.native.logsumexp(x)

    def argmax(self, x: Tensor) -> Tensor:
        """See ``Ops.argmax``."""
        return self.native.argmax(x)

    def topk(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See ``Ops.topk``."""
        return self.native.topk(x, k)

    def cumsum(self, x: Tensor) -> Tensor:
        """See ``Ops.cumsum``."""
        return self.native.cumsum(x)

    def exp(self, x: Tensor) -> Tensor:
        """See ``Ops.exp``."""
        return self.native.exp(x)

    def take_columns(self, x: Tensor, index: Tensor) -> Tensor:
        """See ``Ops.take_columns``."""
        return self.native.take_columns(x, index)

    def scatter_add(self, x: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
        """See ``Ops.scatter_add``; changes ``x`` in place."""
        return self.native.scatter_add(x, rows, columns, values)

    def unpack_bits(self, mask: Tensor, columns: int) -> Tensor:
        """See ``Ops.unpack_bits``."""
        return self.native.unpack_bits(mask, columns)

    def gumbel(
        self, seeds: np.ndarray[Any, Any] | Tensor, positions: np.ndarray[Any, Any] | Tensor, ids: Tensor | int
    ) -> Tensor:
        """See ``Ops.gumbel``; seeds and positions may also be tensors, which a recorded step finds filled anew."""
        if isinstance(seeds, np.ndarray):
            halves = np.ascontiguousarray(seeds, dtype="<u8").view(np.int32).reshape(-1, 2)
            seeds = to_tensor(self.native, halves)
        if isinstance(positions, np.ndarray):
            positions = to_tensor(self.native, np.asarray(positions, dtype=np.int32))
        if isinstance(ids, int):
            return self.native.gumbel_all(seeds, positions, ids)
        return self.native.gumbel(seeds, positions, ids)

    # --- fused ---

    def linear_add(self, x: Tensor, weight: Any, residual: Tensor) -> Tensor:
        """See ``Ops.linear_add``; weights of several parts are left to the composition."""
        own = isinstance(weight, NativeWeight)
        out: Tensor = weight.apply_add(x, residual) if own else super().linear_add(x, weight, residual)
        return out

    def linear_float32(self, x: Tensor, weight: Any) -> Tensor:
        """See ``Ops.linear_float32``; as ``linear_add``."""
        own = isinstance(weight, NativeWeight)
        out: Tensor = weight.apply_float32(x) if own else super().linear_float32(x, weight)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See ``Ops.add_rms_norm``."""
        return self.native.add_rms_norm(x, residual, self._wide(weight), eps)

    def permute_columns(self, x: Tensor, order: Tensor) -> Tensor:
        """See ``Ops.permute_columns``."""
        return self.native.permute_columns(x, order)

    def silu_mul(self, gate_up: Tensor, size: int) -> Tensor:
        """See ``Ops.silu_mul``."""
        return self.native.silu_mul(gate_up, size)

    def gelu_mul(self, gate_up: Tensor, size: int, approximate: bool) -> Tensor:
        """See ``Ops.gelu_mul``."""
        return self.native.gelu_mul(gate_up, size, approximate)

    def _wide(self, weight: Tensor) -> Tensor:
        """A norm's weight in float32, as models have it."""
        return weight if weight.dtype == "float32" else self.native.cast(weight, "float32")

    def _like(self, x: Tensor, other: Tensor) -> Tensor:
        return x if x.dtype == other.dtype else self.native.cast(x, other.dtype)
