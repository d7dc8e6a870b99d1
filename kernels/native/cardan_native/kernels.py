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
        """``float32``, ``bfloat16``, ``float16``, ``int32``, ``uint8``, ``bool``, ``int8`` or ``fp8_...``."""

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


Handle: TypeAlias = Tensor
"""The name of the type where ``Tensor`` is the class that makes them."""


class Kernels(Protocol):
    """A module of kernels."""

    VARIANT: str
    Tensor: TensorMaker
    Graph: GraphMaker

    def __getattr__(self, name: str) -> Any:
        """A function of some other family."""

    # --- threads ---

    def set_threads(self, threads: int, pin: bool = False, spin_us: int = 50) -> None:
        """How many threads compute, the caller's among them; whether each keeps to a core; how long they spin."""

    def pinned(self) -> bool:
        """Whether threads keep to a core each; never where this process may not use every core, or another does so."""

    def threads(self) -> int:
        """How many threads compute."""

    # --- layers ---

    def rms_norm(self, x: Handle, weight: Handle, eps: float) -> Handle:
        """``x / sqrt(mean(x^2) + eps) * weight``."""

    def add_rms_norm(self, x: Handle, residual: Handle, weight: Handle, eps: float) -> tuple[Handle, Handle]:
        """The norm of the sum, and the sum."""

    def layer_norm(self, x: Handle, weight: Handle, bias: Handle | None, eps: float) -> Handle:
        """``(x - mean) / sqrt(var + eps) * weight + bias``."""

    def add(self, a: Handle, b: Handle) -> Handle:
        """``a + b``."""

    def mul(self, a: Handle, b: Handle) -> Handle:
        """``a * b``."""

    def scale(self, x: Handle, factor: float) -> Handle:
        """``x * factor``."""

    def silu(self, x: Handle) -> Handle:
        """``x * sigmoid(x)``."""

    def gelu(self, x: Handle, approximate: bool) -> Handle:
        """GELU."""

    def tanh_softcap(self, x: Handle, cap: float) -> Handle:
        """``cap * tanh(x / cap)``."""

    def silu_mul(self, gate_up: Handle, size: int) -> Handle:
        """``silu(gate) * up``."""

    def gelu_mul(self, gate_up: Handle, size: int, approximate: bool) -> Handle:
        """``gelu(gate) * up``."""

    def cast(self, x: Handle, dtype: str) -> Handle:
        """The values in another type."""

    def rope(self, x: Handle, positions: Handle, cos: Handle, sin: Handle, interleaved: bool) -> Handle:
        """Rotated heads."""

    def concat(self, parts: Sequence[Handle]) -> Handle:
        """Joined along the last axis."""

    def gather_rows(self, x: Handle, index: Handle) -> Handle:
        """Entries of the first axis."""

    def permute_columns(self, x: Handle, order: Handle) -> Handle:
        """Columns of the last axis in another order."""

    def scatter_rows(self, x: Handle, index: Handle, values: Handle) -> Handle:
        """``x`` with entries of the first axis replaced, in place."""

    # --- sampling ---

    def where(self, condition: Handle, a: Handle, b: Handle | float) -> Handle:
        """``a`` or ``b``."""

    def compare(self, a: Handle, relation: str, b: Handle | float) -> Handle:
        """Bool."""

    def arithmetic(self, a: Handle, operation: str, b: Handle | float) -> Handle:
        """Sum, difference, product or quotient."""

    def is_nan(self, x: Handle) -> Handle:
        """Whether each row holds a NaN."""

    def take_columns(self, x: Handle, index: Handle) -> Handle:
        """``x[i, index[i, j]]``."""

    def scatter_add(self, x: Handle, rows: Handle, columns: Handle, values: Handle) -> Handle:
        """``x`` with values added, in place."""

    def unpack_bits(self, mask: Handle, columns: int) -> Handle:
        """Bool from packed words."""

    def exp(self, x: Handle) -> Handle:
        """``e`` to the ``x``."""

    def logsumexp(self, x: Handle) -> Handle:
        """``log(sum(exp(x)))`` of each row."""

    def log_softmax(self, x: Handle) -> Handle:
        """``x - logsumexp(x)``."""

    def argmax(self, x: Handle) -> Handle:
        """Index of the first largest entry of each row."""

    def cumsum(self, x: Handle) -> Handle:
        """Running sums over the last axis."""

    def topk(self, x: Handle, k: int) -> tuple[Handle, Handle]:
        """The ``k`` largest of each row and their columns."""

    def gumbel(self, seeds: Handle, positions: Handle, ids: Handle) -> Handle:
        """Gumbel noise of some tokens."""

    def gumbel_all(self, seeds: Handle, positions: Handle, width: int) -> Handle:
        """Gumbel noise of all tokens."""


_CARRIERS: dict[np.dtype[Any], tuple[str, Any]] = {
    np.dtype(np.float32): ("float32", None),
    np.dtype(np.int32): ("int32", None),
    np.dtype(np.uint8): ("uint8", None),
    np.dtype(np.float16): ("float16", np.uint16),
    np.dtype(np.bool_): ("bool", np.uint8),
}
"""Types that are taken, by what numpy calls them (whose ``name`` costs microseconds), and what carries their bits."""


def to_tensor(kernels: Kernels, array: np.ndarray[Any, Any]) -> Tensor:
    """A copy of a numpy array: float32, float16, int32, uint8 and bool keep their type, others are not taken.

    Raises:
        ValueError: the array has another type.
    """
    bits = to_bits(array)
    return kernels.Tensor.from_bits(bits, _CARRIERS[array.dtype][0])


def to_bits(array: np.ndarray[Any, Any]) -> Bits:
    """The array as ``Tensor.copy_bits`` takes it: contiguous, float16 as uint16 and bool as uint8.

    Raises:
        ValueError: the array has a type that is not taken.
    """
    known = _CARRIERS.get(array.dtype)
    if known is None:
        raise ValueError(
            f"array must be float32, float16, int32, uint8 or bool, got {array.dtype.name}. Convert it first."
        )
    plain = np.ascontiguousarray(array)
    return plain if known[1] is None else plain.view(known[1])


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
