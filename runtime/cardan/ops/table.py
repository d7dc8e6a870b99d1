"""The ops table: every operation that models and the sampler use, on opaque array handles.

It knows no array library. ``cardan.ops.specs`` declares each operation's axes, dtypes, float64 reference and bounds.
A platform implements the primitives; fused operations have default compositions in this class.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cardan.types import Array, Int32Array, SamplingBatch


class TokenDrawer(Protocol):
    """Chooses a token for each row: the likeliest, or one drawn under temperature, top-k, top-p and min-p."""

    def __call__(self, scores: Array, sampling: SamplingBatch, logits: Array) -> tuple[Array, Array]:
        """Tokens int32 ``[n]``, 0 for rows that fail, and which do, bool ``[n]``; it must not wait for the device.

        Args:
            scores: float32 ``[n, vocab]``, after penalties, biases and masks.
            sampling: how each row is drawn; noise is that of ``Ops.gumbel``.
            logits: the model's, of which NaN fails a row; the same array as ``scores`` where nothing changed them.
        """


@dataclass(frozen=True, slots=True)
class Penalized:
    """Which of a step's rows penalize repetition, and what they have seen.

    Attributes:
        lines: int32 ``[n]`` on the host, each row's line of the counts; -1 where it penalizes nothing.
        prompt: float32 ``[lines, vocab]`` on the device, above 0 where a token occurs in the prompt.
        output: float32 ``[lines, vocab]`` on the device, how often a token occurs in the output.
    """

    lines: Int32Array
    prompt: Array
    output: Array


class LogitAdjuster(Protocol):
    """Does to logits what requests ask for before a token is chosen: penalties, sparse biases, a grammar's mask."""

    def __call__(
        self, logits: Array, sampling: SamplingBatch, penalized: Penalized | None, mask: np.ndarray[Any, Any] | None
    ) -> Array:
        """Scores float32 ``[n, vocab]``, a new array; it must not wait for the device.

        Args:
            logits: float32 ``[n, vocab]``.
            sampling: the rows' penalties and biases.
            penalized: rows with penalties; None where there are none.
            mask: uint32 ``[n, ceil(vocab / 32)]`` on the host, packed bits of the tokens that are allowed; None where
                all rows allow all.
        """


class Ops(abc.ABC):
    """Operations of one device. Shapes name axes; ``...`` is any number of leading axes."""

    # --- host and device ---

    @abc.abstractmethod
    def from_host(self, array: np.ndarray[Any, Any], dtype: str | None = None) -> Array:
        """Copy a numpy array to the device, cast to ``dtype`` where given."""

    @abc.abstractmethod
    def to_host(self, x: Array) -> np.ndarray[Any, Any]:
        """Wait for ``x`` and copy it to numpy (bfloat16 comes as float32)."""

    @abc.abstractmethod
    def cast(self, x: Array, dtype: str) -> Array:
        """Convert the element type."""

    # --- layers ---

    @abc.abstractmethod
    def embed(self, ids: Array, table: Any) -> Array:
        """Rows ``ids: int32 [tokens]`` of a packed ``table``; returns ``[tokens, features]``."""

    @abc.abstractmethod
    def linear(self, x: Array, weight: Any) -> Array:
        """``x: [tokens, in]`` by a packed weight (bias included); returns ``[tokens, out]``."""

    @abc.abstractmethod
    def add(self, a: Array, b: Array) -> Array:
        """Elementwise sum; ``b`` may lack leading axes of ``a``."""

    @abc.abstractmethod
    def mul(self, a: Array, b: Array) -> Array:
        """Elementwise product; ``b`` may lack leading axes of ``a``."""

    @abc.abstractmethod
    def scale(self, x: Array, factor: float) -> Array:
        """``x * factor``, in ``x``'s type."""

    @abc.abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, computed in float32."""

    @abc.abstractmethod
    def layer_norm(self, x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
        """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last axis, computed in float32."""

    @abc.abstractmethod
    def silu(self, x: Array) -> Array:
        """``x * sigmoid(x)``."""

    @abc.abstractmethod
    def gelu(self, x: Array, approximate: bool) -> Array:
        """GELU, exact or by the tanh approximation."""

    @abc.abstractmethod
    def tanh_softcap(self, x: Array, cap: float) -> Array:
        """``cap * tanh(x / cap)``."""

    @abc.abstractmethod
    def rope(self, x: Array, positions: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
        """Rotate the first ``2 * cos.width`` features of ``x: [tokens, heads, dim]`` by ``positions: [tokens]``.

        ``cos`` and ``sin`` are float32 ``[context, rotary_dim / 2]``; computed in float32.
        """

    @abc.abstractmethod
    def split(self, x: Array, sizes: Sequence[int]) -> tuple[Array, ...]:
        """Cut the last axis into pieces of the given sizes."""

    @abc.abstractmethod
    def concat(self, xs: Sequence[Array]) -> Array:
        """Join along the last axis."""

    @abc.abstractmethod
    def split_heads(self, x: Array, heads: int) -> Array:
        """``[tokens, heads * dim]`` to ``[tokens, heads, dim]``."""

    @abc.abstractmethod
    def merge_heads(self, x: Array) -> Array:
        """``[tokens, heads, dim]`` to ``[tokens, heads * dim]``."""

    @abc.abstractmethod
    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        """The same elements in row-major order in another shape; one size may be -1."""

    @abc.abstractmethod
    def gather_rows(self, x: Array, index: Array) -> Array:
        """Rows ``index: int32 [n]`` of ``x: [rows, ...]``."""

    @abc.abstractmethod
    def scatter_rows(self, x: Array, index: Array, values: Array) -> Array:
        """``x`` with rows ``index: int32 [n]`` replaced by ``values: [n, ...]``; may change ``x`` in place."""

    # --- logits and sampling; all float32 [rows, columns] unless said otherwise ---

    @abc.abstractmethod
    def where(self, condition: Array, a: Array, b: Array | float) -> Array:
        """``a`` where the condition holds, else ``b``."""

    @abc.abstractmethod
    def compare(self, a: Array, relation: str, b: Array | float) -> Array:
        """Elementwise ``a < b``, ``<=``, ``>``, ``>=``, ``==`` or ``!=``; ``b`` may be ``[rows, 1]``."""

    @abc.abstractmethod
    def arithmetic(self, a: Array, operation: str, b: Array | float) -> Array:
        """Elementwise ``a + b``, ``-``, ``*`` or ``/``; ``b`` may be ``[rows, 1]``."""

    @abc.abstractmethod
    def is_nan(self, x: Array) -> Array:
        """Whether each row of ``x: [rows, columns]`` holds a NaN; returns bool ``[rows]``."""

    @abc.abstractmethod
    def log_softmax(self, x: Array) -> Array:
        """``x - logsumexp(x)`` over the last axis."""

    @abc.abstractmethod
    def logsumexp(self, x: Array) -> Array:
        """``log(sum(exp(x)))`` over the last axis; returns ``[rows]``."""

    @abc.abstractmethod
    def argmax(self, x: Array) -> Array:
        """Index of the first largest entry of each row; returns int32 ``[rows]``."""

    @abc.abstractmethod
    def topk(self, x: Array, k: int) -> tuple[Array, Array]:
        """The ``k`` largest of each row, largest first, equal values by lower index first; ids are int32."""

    @abc.abstractmethod
    def cumsum(self, x: Array) -> Array:
        """Running sum over the last axis."""

    @abc.abstractmethod
    def exp(self, x: Array) -> Array:
        """``e`` to the ``x``."""

    @abc.abstractmethod
    def take_columns(self, x: Array, index: Array) -> Array:
        """``x[i, index[i, j]]`` for ``index: int32 [rows, k]``; returns ``[rows, k]``."""

    @abc.abstractmethod
    def scatter_add(self, x: Array, rows: Array, columns: Array, values: Array) -> Array:
        """``x`` with ``values: [m]`` added at ``(rows, columns)``, repeated places summed; may change ``x``."""

    @abc.abstractmethod
    def unpack_bits(self, mask: Array, columns: int) -> Array:
        """Bool ``[rows, columns]`` from packed uint32 words given as int32 ``[rows, ceil(columns / 32)]``."""

    @abc.abstractmethod
    def gumbel(self, seeds: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], ids: Array | int) -> Array:
        """Gumbel noise from Philox4x32-10; ``positions: int32 [rows]``.

        Key: the low, then the high half of ``seeds: uint64 [rows]``. Counter: ``(id >> 2, position, 0, 0)``; word
        ``id & 3`` of the block becomes ``u = (word + 0.5) / 2^32``, and the noise is ``-log(-log(u))``, as float64
        arithmetic gives it (within a few ulp of float32), returned in float32 and always finite. Float32 alone does
        not do: words near 2^32 round to ``u = 1``. There ``1 - u = (2^32 - word - 0.5) / 2^32`` keeps its digits, and
        ``log1p(-(1 - u))`` is the inner logarithm.

        ``ids`` is int32 ``[rows, k]``, or the width of the vocabulary for all ids in order.

        Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
        """

    def token_drawer(self) -> TokenDrawer | None:
        """A kernel that chooses tokens at once, or None where the sampler composes them of the operations above."""
        return None

    def logit_adjuster(self) -> LogitAdjuster | None:
        """A kernel for penalties, biases and masks, or None where the sampler composes them of the same operations."""
        return None

    # --- ranks ---

    def all_reduce(self, x: Array) -> Array:
        """Sum over tensor-parallel ranks; one rank returns ``x``."""
        return x

    def all_gather(self, x: Array) -> Array:
        """Join the last axis over tensor-parallel ranks; one rank returns ``x``."""
        return x

    # --- fused, optional: a platform overrides what it has a kernel for ---

    def rope_prepare(self, positions: Array, cos: Array, sin: Array, interleaved: bool) -> Any:
        """What all rotations of one step share, gathered once; ``rope_apply`` takes it back."""
        return positions, cos, sin, interleaved

    def rope_apply(self, x: Array, prepared: Any) -> Array:
        """Rotate ``x: [tokens, heads, dim]`` as ``rope`` does, by what ``rope_prepare`` returned."""
        return self.rope(x, *prepared)

    @property
    def has_linear_add(self) -> bool:
        """Whether ``linear_add`` is a kernel; where it is not, ``add_rms_norm`` may save more than it does."""
        return type(self).linear_add is not Ops.linear_add

    def linear_add(self, x: Array, weight: Any, residual: Array) -> Array:
        """``residual: [tokens, out]`` plus ``linear``'s result, summed over ranks as ``all_reduce`` does.

        A kernel for it adds up in float32 and rounds once; this composition rounds the product by itself.
        """
        return self.add(residual, self.all_reduce(self.linear(x, weight)))

    def linear_float32(self, x: Array, weight: Any) -> Array:
        """``linear``'s result in float32, whatever the type of ``x``: for logits, whose near ties a narrow type hides.

        A kernel for it does not round to a narrower type in between; this composition does.
        """
        return self.cast(self.linear(x, weight), "float32")

    @property
    def has_permute_columns(self) -> bool:
        """Whether ``permute_columns`` is a kernel; where it is not, weights in act-order are widened instead."""
        return type(self).permute_columns is not Ops.permute_columns

    def permute_columns(self, x: Array, order: Array) -> Array:
        """``x[:, order]`` for ``x: [tokens, features]`` and a permutation ``order: int32 [features]``.

        This composition cuts ``x`` into single columns.
        """
        columns = [int(column) for column in self.to_host(order)]
        pieces = self.split(x, (1,) * len(columns))
        return self.concat([pieces[column] for column in columns])

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
        """``s = x + residual``; returns ``(rms_norm(s), s)``."""
        total = self.add(x, residual)
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: Array, size: int) -> Array:
        """``silu(gate) * up`` for ``gate_up: [tokens, 2 * size]``."""
        gate, up = self.split(gate_up, (size, size))
        return self.mul(self.silu(gate), up)

    def gelu_mul(self, gate_up: Array, size: int, approximate: bool) -> Array:
        """``gelu(gate) * up`` for ``gate_up: [tokens, 2 * size]``."""
        gate, up = self.split(gate_up, (size, size))
        return self.mul(self.gelu(gate, approximate), up)
