"""Level 2 of the seam: an ops table and four providers, from which ``cardan.runner`` makes a level-1 device.

It knows no model: attention, linears, capture and memory are all that a platform supplies.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np

from cardan.ops.table import Ops
from cardan.platform.communicator import Communicator, RankPlace
from cardan.platform.device import DeviceInfo, KVPool
from cardan.platform.memory import Memory, MemoryPolicy
from cardan.types import Array, ForwardMode, Int32Array, KVLayout, LayerKV, TableDelta, TensorView


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """The linear that a weight is packed for.

    Attributes:
        name: of the parameter, for messages.
        out_features: rows of the weight.
        in_features: columns of the weight.
        dtype: type of the activations.
        quantize: format of the platform's own that weights are to be quantized to at load (``--quantization``), or
            None to keep the checkpoint's.
    """

    name: str
    out_features: int
    in_features: int
    dtype: str
    quantize: str | None = None


class PackedWeight(abc.ABC):
    """A weight as a ``LinearMethod`` packed it; ``ops.linear`` and ``ops.embed`` take it."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Bytes on the device."""

    @abc.abstractmethod
    def apply(self, x: Array) -> Array:
        """``x @ weight.T + bias`` for ``x: [tokens, in_features]``; returns ``[tokens, out_features]``."""

    @abc.abstractmethod
    def gather(self, ids: Array) -> Array:
        """Rows ``ids: int32 [n]`` of the weight, widened to the activations' type: ``[n, in_features]``."""


@dataclass(frozen=True, slots=True)
class ActivationCodes:
    """How a GEMM quantizes activations before it multiplies them: to whole multiples of a step, symmetric around 0.

    Attributes:
        largest: the code of the largest magnitude of a group, 127 for int8; the step is that magnitude over it.
        group: neighbouring activations of a token that share a step; None for all of a token.
    """

    largest: int
    group: int | None


class LinearMethod(abc.ABC):
    """A GEMM for some weight formats."""

    name: str

    @abc.abstractmethod
    def claims(self, fmt: str, spec: LinearSpec) -> str | None:
        """None when it takes weights of this format for this linear, else the reason why not."""

    def activation_codes(self, fmt: str, spec: LinearSpec) -> ActivationCodes | None:
        """How it quantizes the activations of a linear in this format; None where it multiplies them as they are."""
        return None

    @abc.abstractmethod
    def pack(self, views: Sequence[TensorView], spec: LinearSpec, bias: Array | None) -> PackedWeight:
        """Pack the rows of ``views``, all of one format, concatenated in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMeta:
    """One step, as attention backends see it, on the host.

    Attributes:
        mode: what the rows do.
        query_starts: int32 ``[rows + 1]``.
        seq_lens: int32 ``[rows]``, after this step.
        row_ids: int32 ``[rows]``, row of the tables.
        positions: int32 ``[tokens]``.
        out_slots: int32 ``[groups, tokens]``.
    """

    mode: ForwardMode
    query_starts: Int32Array
    seq_lens: Int32Array
    row_ids: Int32Array
    positions: Int32Array
    out_slots: Int32Array


class OpsKVPool(KVPool):
    """A pool whose arrays a graph runner can bind: one array for keys and one for values per layer."""

    @abc.abstractmethod
    def leaves(self) -> tuple[Array, ...]:
        """All arrays of the pool in a fixed order."""

    @abc.abstractmethod
    def bind(self, leaves: Sequence[Array]) -> None:
        """Replace the arrays (functional libraries return new ones)."""

    @abc.abstractmethod
    def update_tables(self, deltas: Sequence[TableDelta]) -> None:
        """Apply changes to the device's row-to-slot tables."""


class AttentionBackend(abc.ABC):
    """Writes KV and attends over it."""

    name: str

    @abc.abstractmethod
    def plan(self, meta: AttentionMeta) -> Any:
        """Prepare one step on the host, outside capture; the result goes to every ``forward`` of the step."""

    @abc.abstractmethod
    def forward(self, q: Array, k: Array, v: Array, layer: LayerKV, plan: Any, sinks: Array | None = None) -> Array:
        """Write ``k: [tokens, kv_heads, k_dim]``, ``v: [tokens, kv_heads, v_dim]`` into the pool and attend.

        ``q: [tokens, q_heads, k_dim]``; returns ``[tokens, q_heads * v_dim]``.
        """


@runtime_checkable
class RotatingAttention(Protocol):
    """What a backend adds to ``AttentionBackend`` where one kernel of it rotates queries and keys as it writes them."""

    def forward_rotating(
        self,
        qkv: tuple[Array, Array, Array],
        rotation: Any,
        layer: LayerKV,
        plan: Any,
        sinks: Array | None = None,
    ) -> Array:
        """``forward`` with queries and keys that are not rotated yet.

        ``rotation`` is what ``Ops.rope_prepare`` gave; rotated values are rounded as ``Ops.rope_apply`` rounds them.
        """


CapturedStep: TypeAlias = Callable[[Array, Array, Any], Array]
"""``(input_ids: [tokens], positions: [tokens], attention plan) -> hidden: [tokens, hidden]``; it may be recorded."""


class GraphRunner(abc.ABC):
    """Captures decode steps of fixed shape and replays them.

    It is made for one ``CapturedStep`` over one pool. What is bucketed is its own affair: rows, and where keys are
    gathered also their width. Attention is planned inside ``replay``, outside what is captured.

    Attributes:
        captures_ahead: whether buckets should be captured before the first request. False where a step is captured by
            being run, which takes no longer than running it: a server then starts sooner.
    """

    captures_ahead: ClassVar[bool] = True

    @abc.abstractmethod
    def can_replay(self, meta: AttentionMeta) -> bool:
        """Whether a decode step has a bucket; the runner runs it eagerly where not."""

    @abc.abstractmethod
    def replay(self, input_ids: Array, meta: AttentionMeta) -> Array:
        """Run a decode step of ``input_ids: int32 [rows]``, capturing its bucket first where that is new.

        Returns ``[rows, hidden]``.
        """


class Recording(abc.ABC):
    """Operations that were recorded, over fixed arrays."""

    @abc.abstractmethod
    def replay(self) -> None:
        """Run all of them again by one call: arrays that were filled since are read as they are now."""


class Recorder(abc.ABC):
    """Records calls of ops and runs them again. The runner records what follows a replayed decode step: the head and
    the sampling of plain batches.

    A device that has one promises more of its ops: ``scatter_rows`` works in place; ``gumbel`` takes seeds and
    positions as arrays of the device too, int32 ``[rows, 2]`` (low, then high halves) and ``[rows]``; and its graph
    runner gives the same array back for each step of a bucket.
    """

    @abc.abstractmethod
    def record(self, run: Callable[[], tuple[Array, ...]]) -> tuple[Recording, tuple[Array, ...]]:
        """Call ``run`` once and record it. Returns its results, too: every replay overwrites them."""

    @abc.abstractmethod
    def fill(self, x: Array, values: np.ndarray[Any, Any]) -> None:
        """Overwrite an array that came from ``from_host`` in place, by values of its own shape and type."""


class Fetch(Protocol):
    """Arrays on their way to the host."""

    def wait(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Block until they are there."""


class OpsDevice(abc.ABC):
    """A device that supplies ops and providers."""

    @property
    @abc.abstractmethod
    def info(self) -> DeviceInfo:
        """Which device this is."""

    @property
    @abc.abstractmethod
    def ops(self) -> Ops:
        """The ops table."""

    def scope(self) -> AbstractContextManager[Any]:
        """Entered around everything that the runner does on the device; switch off here what only training needs."""
        return nullcontext()

    @abc.abstractmethod
    def memory(self) -> Memory:
        """Memory as it is now."""

    @abc.abstractmethod
    def memory_policy(self) -> MemoryPolicy:
        """How memory is divided."""

    @abc.abstractmethod
    def linear_methods(self) -> tuple[LinearMethod, ...]:
        """GEMMs, the preferred one first; the last takes dense float32, bfloat16 and float16 weights."""

    @abc.abstractmethod
    def allocate_kv(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> OpsKVPool:
        """Allocate a zeroed pool of ``num_slots`` slots and tables of ``num_rows`` x ``max_length``."""

    @abc.abstractmethod
    def attention(self, name: str, pool: OpsKVPool, layout: KVLayout, dtype: str) -> AttentionBackend:
        """Make the attention backend ``name`` over a pool."""

    def graph_runner(self, pool: OpsKVPool, backend: AttentionBackend, step: CapturedStep) -> GraphRunner | None:
        """A graph runner for decode steps over ``pool`` with ``backend``, or None where steps run eagerly."""
        return None

    def recorder(self) -> Recorder | None:
        """Records ops outside graphs of decode steps, or None where each is called anew."""
        return None

    def communicator(self, place: RankPlace) -> Communicator | None:
        """Join a group of ranks, so that the ops' ``all_reduce`` and ``all_gather`` go over it; None where none can.

        No engine calls it so far: one rank runs, and ``--tp-size`` above 1 is refused. The engine that runs several
        will call it once, before weights are loaded, and only on a platform that claims ``tensor_parallel``. Plugins
        for version 1 of the seam need no method of their own: None will stay a refusal of more than one rank.
        """
        return None

    def activation_peak(self, run: Callable[[], None]) -> int | None:
        """Run a dry step and return its peak in bytes beyond what was held before, or None if not measurable."""
        return None

    def submit(self, arrays: Sequence[Array]) -> None:
        """Start computing ``arrays`` and everything written to pools so far, without waiting.

        The runner calls it once the forward pass of a step was described, and when tokens were sampled. Devices that
        compute as they are told to have nothing to do; a lazy library starts here.
        """
        return

    @abc.abstractmethod
    def fetch(self, arrays: Sequence[Array]) -> Fetch:
        """Start copying arrays to the host."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give the device back."""
