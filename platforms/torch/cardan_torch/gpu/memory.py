"""How a GPU's own memory is divided: weights, the largest step, captured steps, head-room by its size, and the pool.

It knows no model and asks no device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cardan.platform import Memory, MemoryPlan, MemoryPolicy, MemoryRequest, SharedMemoryPolicy

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Tier:
    """What suits GPUs of some size of memory.

    Attributes:
        below: bytes of memory that the tier ends at.
        head_room: bytes that nothing is planned into: what the runtime, libraries and fragments take.
        top_bucket: most rows that decode steps are captured for.
        chunk: tokens of a prefill pass.
        rows: running requests.
    """

    below: int
    head_room: int
    top_bucket: int
    chunk: int
    rows: int


TIERS = (
    Tier(below=12 * GIB, head_room=512 * MIB, top_bucket=16, chunk=1024, rows=32),
    Tier(below=20 * GIB, head_room=768 * MIB, top_bucket=32, chunk=2048, rows=64),
    Tier(below=36 * GIB, head_room=1024 * MIB, top_bucket=64, chunk=2048, rows=128),
    Tier(below=60 * GIB, head_room=1536 * MIB, top_bucket=128, chunk=4096, rows=256),
    Tier(below=100 * GIB, head_room=2048 * MIB, top_bucket=256, chunk=8192, rows=512),
    Tier(below=2**63, head_room=3072 * MIB, top_bucket=256, chunk=8192, rows=512),
)

GRAPH_BYTES = 24 * MIB
"""Reserved for what the driver keeps of a captured step: its nodes and their arguments."""

GRAPH_SHARE = 0.25
"""Part of the largest step's activations that the memory shared by captured steps may take: they have a row where that
step has a token, and far fewer of them."""


def tier_of(total: int | None) -> Tier:
    """The tier of a GPU with so many bytes; an unknown size is taken for the smallest."""
    return next(tier for tier in TIERS if (total or 0) < tier.below)


class GpuMemoryPolicy(MemoryPolicy):
    """For memory that the GPU has for itself: all of it but the head-room, unless a share is asked for.

    ``--mem-fraction-static`` is a share of what was free before the weights were loaded, for weights and pool together.
    There is no least pool: what does not fit is an error.
    """

    def __init__(self, buckets: int) -> None:
        """Make a policy; ``buckets`` is how many sizes of decode steps will be captured."""
        self._buckets = buckets

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        """See ``MemoryPolicy.plan``."""
        graphs = request.graph_bytes + self.graph_bytes(request.activation_bytes)
        request = replace(request, graph_bytes=graphs)
        tier = tier_of(request.memory.total)
        policy = SharedMemoryPolicy(fraction=1.0, head_room_share=0.0, least_head_room=tier.head_room)
        planned = policy.plan(request)
        lines = tuple((what, size, self._why(what, why)) for what, size, why in planned.lines)
        return replace(planned, lines=lines)

    def graph_bytes(self, activation_bytes: int) -> int:
        """What captured steps are expected to take."""
        if self._buckets == 0:
            return 0
        return self._buckets * GRAPH_BYTES + int(activation_bytes * GRAPH_SHARE)

    def under_pressure(self, memory: Memory) -> bool:
        """No: the pool is allocated once, and nobody else takes the GPU's memory by degrees."""
        return False

    def _why(self, what: str, why: str) -> str:
        if what == "graphs":
            return f"captured steps of {self._buckets} sizes, which share memory"
        if what == "head-room":
            return "for the runtime, libraries and fragments; by the size of the memory"
        return why
