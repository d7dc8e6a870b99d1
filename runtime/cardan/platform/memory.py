"""How much memory there is, and how it is divided between weights, activations and the KV pool.

It knows no device: a platform measures, this module does the sums and explains them. Only the host's own memory is
measured here, for platforms that share it.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from pathlib import Path

from cardan.errors import MemoryPlanError
from cardan.platform.cgroups import SYSTEM_ROOT, memory_limit

MIB = 2**20


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


def host_memory(root: Path = SYSTEM_ROOT) -> Memory:
    """Memory of the machine, or of the container where that has a lower limit.

    Args:
        root: stands for ``/`` where limits are read; tests put a tree of fakes there.
    """
    import psutil

    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    limit = memory_limit(root)
    if limit is not None:
        total, free = min(total, limit.limit), min(free, limit.left)
    own = int(psutil.Process().memory_info().rss)
    return Memory(total=total, free=free, reserved_by_others=max(total - free - own, 0), shared=True)


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


class SharedMemoryPolicy(MemoryPolicy):
    """For memory that other programs use too: takes a share of what is free now, and leaves head-room.

    The share is of what was free before the weights were loaded, and covers weights and pool together. Activations,
    buffers of captured steps and the head-room come on top and are never given to the pool. There is no least pool:
    what does not fit is an error.
    """

    def __init__(self, fraction: float = 0.5, head_room_share: float = 0.1, least_head_room: int = 512 * MIB) -> None:
        """Make a policy.

        Args:
            fraction: share of free memory for weights and pool, where ``--mem-fraction-static`` is not given.
            head_room_share: part of all memory that stays free for others.
            least_head_room: bytes that stay free on small machines.
        """
        self.fraction = fraction
        self.head_room_share = head_room_share
        self.least_head_room = least_head_room

    def head_room(self, memory: Memory) -> int:
        """Bytes that stay free."""
        share = 0 if memory.total is None else int(memory.total * self.head_room_share)
        return max(share, self.least_head_room)

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        """See ``MemoryPolicy.plan``."""
        if request.memory.free is None:
            return self._plan_unmeasured(request)
        lines = self._budget_lines(request, request.memory.free)
        padding = request.page_size * request.bytes_per_slot
        budget = min(lines[-1][1], self._room(request, request.memory.free)) - padding
        lines.append(("for the pool", budget, "the smaller of the two, less the padding page"))
        affordable = max(budget, 0) // request.bytes_per_slot
        slots, why = _choose_slots(request, affordable)
        if slots < request.min_slots:
            raise MemoryPlanError(_too_small(request, slots, lines))
        pool_bytes = (slots + request.page_size) * request.bytes_per_slot
        lines.append(("KV pool", pool_bytes, f"{slots} tokens and a padding page; {why}"))
        return MemoryPlan(num_slots=slots, pool_bytes=pool_bytes, lines=tuple(lines))

    def under_pressure(self, memory: Memory) -> bool:
        """Whether less than half of the head-room is left."""
        return memory.free is not None and memory.free < self.head_room(memory) // 2

    def _room(self, request: MemoryRequest, free: int) -> int:
        """What can be taken now without touching what steps need and the head-room."""
        return free - request.activation_bytes - request.graph_bytes - self.head_room(request.memory)

    def _budget_lines(self, request: MemoryRequest, free: int) -> list[tuple[str, int, str]]:
        head_room = self.head_room(request.memory)
        lines = [
            ("weights", request.weight_bytes, "as loaded"),
            ("free", free, "measured after the weights were loaded"),
            ("activations", request.activation_bytes, "peak of the largest step"),
            ("graphs", request.graph_bytes, "buffers of captured steps"),
            ("head-room", head_room, "stays free for other programs"),
            ("free less these", self._room(request, free), "free - activations - graphs - head-room"),
        ]
        if request.max_total_tokens is not None:
            lines.append(("allowed", self._room(request, free), "--max-total-tokens takes the place of a share"))
            return lines
        fraction = self.fraction if request.fraction is None else request.fraction
        share = int(fraction * (free + request.weight_bytes)) - request.weight_bytes
        source = "the policy's share" if request.fraction is None else "--mem-fraction-static"
        lines.append(("share", share, f"{fraction:g} of free and weights ({source}), less the weights"))
        return lines

    def _plan_unmeasured(self, request: MemoryRequest) -> MemoryPlan:
        """Memory is unknown: only an explicit pool is believed."""
        if request.max_total_tokens is None:
            raise MemoryPlanError(
                "The free memory of the device is unknown, so the KV pool cannot be sized. "
                "Pass --max-total-tokens N to state its size in tokens."
            )
        slots, why = _choose_slots(request, request.max_total_tokens)
        if slots < request.min_slots:
            raise MemoryPlanError(_too_small(request, slots, []))
        pool_bytes = (slots + request.page_size) * request.bytes_per_slot
        return MemoryPlan(
            num_slots=slots,
            pool_bytes=pool_bytes,
            lines=(("KV pool", pool_bytes, f"{slots} tokens and a padding page; {why}; memory is unknown"),),
        )


def _choose_slots(request: MemoryRequest, affordable: int) -> tuple[int, str]:
    """Whole pages within every bound, and which bound it was."""
    if request.max_total_tokens is not None:
        if affordable < request.max_total_tokens:
            needed, room = (_mib(slots * request.bytes_per_slot) for slots in (request.max_total_tokens, affordable))
            raise MemoryPlanError(
                f"--max-total-tokens {request.max_total_tokens} needs {needed}, but memory has room for {affordable} "
                f"tokens ({room}). Pass --max-total-tokens {affordable} or less."
            )
        wanted, why = request.max_total_tokens, "--max-total-tokens"
    elif affordable > request.useful_slots:
        # rounded up, so that the cap does not cost the last request its last page
        wanted = -(-request.useful_slots // request.page_size) * request.page_size
        wanted, why = min(wanted, affordable), "more could never be used: rows x context length"
    else:
        wanted, why = affordable, "all that the sum leaves"
    return wanted // request.page_size * request.page_size, why


def _too_small(request: MemoryRequest, slots: int, lines: list[tuple[str, int, str]]) -> str:
    sums = "; ".join(f"{what} {_mib(size)}" for what, size, _ in lines)
    return (
        f"The KV pool would hold {slots} tokens, but one request needs {request.min_slots} "
        f"({_mib(request.min_slots * request.bytes_per_slot)} at {request.bytes_per_slot} bytes a token"
        f"{'; ' + sums if sums else ''}). Free memory, raise --mem-fraction-static or --max-total-tokens, "
        "or lower --chunked-prefill-size or --context-length."
    )


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
