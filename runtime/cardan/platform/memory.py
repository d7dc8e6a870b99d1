"""How much memory there is, and how it is divided between weights, activations and the KV pool.

It knows no device: a platform measures, this module does the sums and explains them.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a device as it is now, in bytes.

    Attributes:
        total: what the device has (a cgroup's limit where that is lower), or None when unknown.
        free: what could be taken now, or None when unknown.
        reserved_by_others: what other processes hold.
        shared: the memory also serves other programs (a laptop, a CPU host), so head-room is kept for them.
    """

    total: int | None
    free: int | None
    reserved_by_others: int = 0
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """What has to fit, in bytes.

    Attributes:
        memory: measured after the weights were loaded.
        weight_bytes: weights as loaded.
        activation_bytes: peak of the largest chunk, measured or by formula.
        graph_bytes: buffers of captured steps.
        bytes_per_slot: KV of one token.
        page_size: tokens per page.
        min_slots: least pool that can serve one request at all.
        useful_slots: more than this can never be used (rows times context length).
        fraction: ``--mem-fraction-static``, or None for the policy's own.
        max_total_tokens: ``--max-total-tokens``, or None.
    """

    memory: Memory
    weight_bytes: int
    activation_bytes: int
    graph_bytes: int
    bytes_per_slot: int
    page_size: int
    min_slots: int
    useful_slots: int
    fraction: float | None = None
    max_total_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The outcome: the pool's size and the sums that led to it.

    Attributes:
        num_slots: tokens the pool holds, a multiple of the page size, without the padding page.
        pool_bytes: bytes of the pool, the padding page included.
        lines: ``(what, bytes, why)`` in the order of the sum.
    """

    num_slots: int
    pool_bytes: int
    lines: tuple[tuple[str, int, str], ...]


class MemoryPolicy(abc.ABC):
    """Divides memory."""

    @abc.abstractmethod
    def plan(self, request: MemoryRequest) -> MemoryPlan:
        """Divide the memory.

        Raises:
            MemoryPlanError: capacity is unknown and no flag states it, or the least pool does not fit.
        """

    def under_pressure(self, memory: Memory) -> bool:
        """Whether cache should be given up and requests queued, asked now and then while running."""
        return False
