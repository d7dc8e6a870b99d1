"""How an NPU's own memory is divided, and what suits cards of 32 and of 64 GB.

It knows no model and asks no device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cardan.errors import MemoryPlanError
from cardan.platform import Memory, MemoryPlan, MemoryPolicy, MemoryRequest, SharedMemoryPolicy

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Tier:
    """What suits NPUs of some size of memory.

    Attributes:
        below: bytes of memory that the tier ends at.
        name: in reasons.
        head_room: bytes that nothing is planned into: workspaces of operators, HCCL's and CANN's buffers, fragments.
        chunk: tokens of a prefill pass.
        rows: running requests.
        graph_rows: most rows of a decode step that is captured.
    """

    below: int
    name: str
    head_room: int
    chunk: int
    rows: int
    graph_rows: int


TIERS = (
    Tier(below=24 * GIB, name="less than 24 GB", head_room=512 * MIB, chunk=2048, rows=32, graph_rows=16),
    Tier(below=48 * GIB, name="32 GB", head_room=1536 * MIB, chunk=4096, rows=128, graph_rows=16),
    Tier(below=2**63, name="64 GB", head_room=3072 * MIB, chunk=8192, rows=256, graph_rows=64),
)

GRAPH_BYTES = 8 * MIB
"""Reserved for a captured step: its tasks, its stream, and the arguments that the driver keeps."""

GRAPH_SHARE = 0.25
"""Part of the largest step's activations that captured steps may take, which share one pool."""


def tier_of(total: int | None) -> Tier:
    """The tier of an NPU with so many bytes; an unknown size is taken for the smallest."""
    return next(tier for tier in TIERS if (total or 0) < tier.below)


class NpuMemoryPolicy(MemoryPolicy):
    """For memory that nobody else takes: all of it but the head-room, unless a share is asked for.

    There is no least pool: what does not fit is an error.
    """

    def __init__(self, buckets: int) -> None:
        """Make a policy; ``buckets`` is how many sizes of decode steps may be captured."""
        self._buckets = buckets

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        """See ``MemoryPolicy.plan``."""
        graphs = request.graph_bytes + self.graph_bytes(request.activation_bytes)
        head_room = tier_of(request.memory.total).head_room
        policy = SharedMemoryPolicy(fraction=1.0, head_room_share=0.0, least_head_room=head_room)
        try:
            planned = policy.plan(replace(request, graph_bytes=graphs))
        except MemoryPlanError as error:
            raise MemoryPlanError(f"{error} A smaller graph_max_rows takes less too.") from error
        lines = tuple((what, size, self._why(what, why)) for what, size, why in planned.lines)
        return replace(planned, lines=lines)

    def graph_bytes(self, activation_bytes: int) -> int:
        """What captured steps are expected to take."""
        if self._buckets == 0:
            return 0
        return self._buckets * GRAPH_BYTES + int(activation_bytes * GRAPH_SHARE)

    def under_pressure(self, memory: Memory) -> bool:
        """No: the pool is allocated once, and nobody else takes the memory by degrees."""
        return False

    def _why(self, what: str, why: str) -> str:
        if what == "graphs":
            return f"captured steps of up to {self._buckets} sizes"
        if what == "head-room":
            return "for operators' workspaces, CANN and fragments; by the size of the memory"
        return why
