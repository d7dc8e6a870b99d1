"""How memory that a device has for itself is divided: weights, the largest step, captured steps, head-room, the pool.

It knows no device: sizes and words are a platform's data, and it imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cardan.errors import MemoryPlanError
from cardan.platform import Memory, MemoryPlan, MemoryPolicy, MemoryRequest, Recommendation, SharedMemoryPolicy

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """What suits devices of some size of memory.

    Attributes:
        below: bytes of memory that the tier ends at.
        head_room: bytes that nothing is planned into: what the runtime, libraries and fragments take.
        top_bucket: most rows of a decode step that is captured.
        chunk: tokens of a prefill pass.
        rows: running requests.
    """

    below: int
    head_room: int
    top_bucket: int
    chunk: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMemory:
    """Everything in which the memory of one kind of device differs from another's.

    Attributes:
        device: with its article, for reasons: ``a GPU``.
        tiers: the smallest first; the last has no end.
        graph_bytes: reserved for what the driver keeps of each captured step.
        graph_share: part of the largest step's activations that the memory which captured steps share may take: they
            have a row where that step has a token, and far fewer of them.
        head_room: what takes it, for reasons.
        top_option: option of the platform that bounds the rows of captured steps.
    """

    device: str
    tiers: Sequence[Tier]
    graph_bytes: int
    graph_share: float
    head_room: str
    top_option: str

    def tier(self, total: int | None) -> Tier:
        """The tier of a device with so many bytes; an unknown size is taken for the smallest."""
        return next(tier for tier in self.tiers if (total or 0) < tier.below)

    def recommended_sizes(self, total: int | None) -> dict[str, Recommendation]:
        """Sizes that suit a device of so much memory."""
        tier = self.tier(total)
        size = "memory of unknown size" if total is None else f"{total / GIB:.0f} GiB of memory"
        filled = f"fills {self.device} with {size}, and running requests wait less"
        return {
            "chunked_prefill_size": Recommendation(tier.chunk, filled),
            "max_running_requests": Recommendation(tier.rows, f"for {size}; decode steps hardly grow with rows"),
        }


class OwnMemoryPolicy(MemoryPolicy):
    """For memory that nobody else takes: all of it but the head-room, unless a share is asked for.

    ``--mem-fraction-static`` is a share of what was free before the weights were loaded, for weights and pool together.
    There is no least pool: what does not fit is an error.
    """

    def __init__(self, own: OwnMemory, buckets: int) -> None:
        """Make a policy.

        Args:
            own: of the device.
            buckets: how many sizes of decode steps may be captured.
        """
        self._own = own
        self._buckets = buckets

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        """See ``MemoryPolicy.plan``."""
        graphs = request.graph_bytes + self.graph_bytes(request.activation_bytes)
        head_room = self._own.tier(request.memory.total).head_room
        policy = SharedMemoryPolicy(fraction=1.0, head_room_share=0.0, least_head_room=head_room)
        try:
            planned = policy.plan(replace(request, graph_bytes=graphs))
        except MemoryPlanError as error:
            if self._buckets == 0:
                raise
            raise MemoryPlanError(f"{error} A smaller {self._own.top_option} takes less too.") from error
        lines = tuple((what, size, self._why(what, why)) for what, size, why in planned.lines)
        return replace(planned, lines=lines)

    def graph_bytes(self, activation_bytes: int) -> int:
        """What captured steps are expected to take."""
        if self._buckets == 0:
            return 0
        return self._buckets * self._own.graph_bytes + int(activation_bytes * self._own.graph_share)

    def under_pressure(self, memory: Memory) -> bool:
        """No: the pool is allocated once, and nobody else takes the memory by degrees."""
        return False

    def _why(self, what: str, why: str) -> str:
        if what == "graphs":
            return f"captured steps of up to {self._buckets} sizes, which share memory"
        if what == "head-room":
            return f"for {self._own.head_room}; by the size of the memory"
        return why
