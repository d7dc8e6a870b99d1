"""What the modules of kernels offer, as types: every variant has the same functions.

It runs nothing: the functions are in C++, and shapes and errors are documented there, in ``src/ops``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Bits: TypeAlias = npt.NDArray[Any]
"""A numpy array; bfloat16 and float16 stand in uint16, bool in uint8."""


class Tensor(Protocol):
    """An array of one variant, of up to four axes."""

    @property
    def dtype(self) -> str:
        """``float32``, ``bfloat16``, ``float16``, ``int32``, ``uint8`` or ``bool``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its axes."""

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""

    def bits(self) -> Bits:
        """The memory itself, not a copy."""

    def copy_bits(self, array: Bits) -> None:
        """Overwrite the contents in place."""

    def columns(self, start: int, count: int) -> Tensor:
        """A view of some of the last axis."""

    def split_heads(self, heads: int) -> Tensor:
        """A view of ``[..., heads * dim]`` as ``[..., heads, dim]``."""

    def merge_heads(self) -> Tensor:
        """``[..., heads, dim]`` as ``[..., heads * dim]``; a view where that can be."""

    def reshaped(self, shape: Sequence[int]) -> Tensor:
        """The same elements in another shape; a view where it is contiguous."""

    def contiguous(self) -> Tensor:
        """Itself where it is contiguous, else a copy."""


class TensorMaker(Protocol):
    """The class of a variant's tensors."""

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        """Memory with whatever was in it."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Tensor:
        """Zeros, committed page by page as they are touched."""

    def from_bits(self, array: Bits, dtype: str) -> Tensor:
        """A copy of a numpy array."""


class Graph(Protocol):
    """Kernels that were recorded, to be run again by one call."""

    def __enter__(self) -> Graph:
        """Record what this thread computes."""

    def __exit__(self, *error: object) -> None:
        """End the recording."""

    def replay(self) -> None:
        """Run all kernels again."""

    def __len__(self) -> int:
        """How many kernels there are."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers that it holds."""


class GraphMaker(Protocol):
    """The class of a variant's graphs."""

    def __call__(self) -> Graph:
        """An empty graph."""


class Kernels(Protocol):
    """A module of kernels."""

    VARIANT: str
    Tensor: TensorMaker
    Graph: GraphMaker

    def __getattr__(self, name: str) -> Any:
        """A function of some other family."""

    # --- threads ---

    def set_threads(self, threads: int) -> None:
        """How many threads compute, the caller's among them."""

    def threads(self) -> int:
        """How many threads compute."""

    # --- layers ---

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight``."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of the sum, and the sum."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """``(x - mean) / sqrt(var + eps) * weight + bias``."""

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """``a + b``."""

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """``a * b``."""

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """``x * factor``."""

    def silu(self, x: Tensor) -> Tensor:
        """``x * sigmoid(x)``."""

    def gelu(self, x: Tensor, approximate: bool) -> Tensor:
        """GELU."""

    def tanh_softcap(self, x: Tensor, cap: float) -> Tensor:
        """``cap * tanh(x / cap)``."""

    def silu_mul(self, gate_up: Tensor, size: int) -> Tensor:
        """``silu(gate) * up``."""

    def gelu_mul(self, gate_up: Tensor, size: int, approximate: bool) -> Tensor:
        """``gelu(gate) * up``."""

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """The values in another type."""

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """Rotated heads."""

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Joined along the last axis."""

    def gather_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """Entries of the first axis."""

    def scatter_rows(self, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        """``x`` with entries of the first axis replaced, in place."""

    # --- sampling ---

    def where(self, condition: Tensor, a: Tensor, b: Tensor | float) -> Tensor:
        """``a`` or ``b``."""

    def compare(self, a: Tensor, relation: str, b: Tensor | float) -> Tensor:
        """Bool."""

    def arithmetic(self, a: Tensor, operation: str, b: Tensor | float) -> Tensor:
        """Sum, difference, product or quotient."""

    def is_nan(self, x: Tensor) -> Tensor:
        """Whether each row holds a NaN."""

    def take_columns(self, x: Tensor, index: Tensor) -> Tensor:
        """``x[i, index[i, j]]``."""

    def scatter_add(self, x: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
        """``x`` with values added, in place."""

    def unpack_bits(self, mask: Tensor, columns: int) -> Tensor:
        """Bool from packed words."""

    def exp(self, x: Tensor) -> Tensor:
        """``e`` to the ``x``."""

    def logsumexp(self, x: Tensor) -> Tensor:
        """``log(sum(exp(x)))`` of each row."""

    def log_softmax(self, x: Tensor) -> Tensor:
        """``x - logsumexp(x)``."""

    def argmax(self, x: Tensor) -> Tensor:
        """Index of the first largest entry of each row."""

    def cumsum(self, x: Tensor) -> Tensor:
        """Running sums over the last axis."""

    def topk(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The ``k`` largest of each row and their columns."""

    def gumbel(self, seeds: Sequence[int], positions: Sequence[int], ids: Tensor) -> Tensor:
        """Gumbel noise of some tokens."""

    def gumbel_all(self, seeds: Sequence[int], positions: Sequence[int], width: int) -> Tensor:
        """Gumbel noise of all tokens."""


def to_tensor(kernels: Kernels, array: np.ndarray[Any, Any]) -> Tensor:
    """A copy of a numpy array: float32, float16, int32, uint8 and bool keep their type, others are not taken.

    Raises:
        ValueError: the array has another type.
    """
    name = array.dtype.name
    if name not in ("float32", "float16", "int32", "uint8", "bool"):
        raise ValueError(f"array must be float32, float16, int32, uint8 or bool, got {name}. Convert it first.")
    carrier = {"float16": np.uint16, "bool": np.uint8}.get(name)
    plain = np.ascontiguousarray(array)
    return kernels.Tensor.from_bits(plain if carrier is None else plain.view(carrier), name)


def to_array(x: Tensor) -> np.ndarray[Any, Any]:
    """A copy as a numpy array; bfloat16 comes as float32."""
    bits = x.bits()
    if x.dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if x.dtype == "float16":
        return np.array(bits).view(np.float16)
    if x.dtype == "bool":
        return np.array(bits).view(np.bool_)
    return np.array(bits)
