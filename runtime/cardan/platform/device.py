"""Level 1 of the seam: everything that a device does for the engine, in plain data.

It knows nothing of ops; a device that implements level 2 is turned into one of these by ``cardan.runner``.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cardan.errors import UnsupportedError
from cardan.platform.memory import Memory, MemoryPlan, MemoryRequest
from cardan.platform.model import Checkpoint, Model
from cardan.types import Batch, Float32Array, KVLayout, SamplingBatch, StepResult

if TYPE_CHECKING:
    from cardan.platform.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One device of a platform.

    Attributes:
        index: its number on the platform.
        name: what its maker calls it.
        detail: what matters for speed (instruction sets, cores, compute capability).
        total_memory: in bytes, or None when unknown.
    """

    index: int
    name: str
    detail: str = ""
    total_memory: int | None = None


class LoadedModel(abc.ABC):
    """A model whose weights are on the device."""

    @property
    @abc.abstractmethod
    def weight_bytes(self) -> int:
        """Bytes that the weights take on the device."""

    @property
    @abc.abstractmethod
    def notes(self) -> tuple[str, ...]:
        """What loading decided, for the plan: formats widened, layers fused."""


class KVPool(abc.ABC):
    """Keys and values of all slots, and the device's copy of the row-to-slot tables."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the pool."""


class Step(abc.ABC):
    """A step under way."""

    @property
    def replayed(self) -> bool:
        """Whether its forward pass was replayed from a captured one, for counters and logs."""
        return False

    def logits(self, rows: Sequence[int]) -> Float32Array:
        """Wait for the model's logits of some of the rows that sample, and copy them to the host, before ``sample``.

        Only platforms that answer for ``Feature.HOST_LOGITS`` are asked.

        Args:
            rows: indices into the ``n`` rows of the batch's ``sampling``.

        Returns:
            float32 ``[len(rows), vocab]``, which the caller may change.
        """
        raise UnsupportedError("This platform's logits stay on the device.")

    @abc.abstractmethod
    def sample(
        self,
        sampling: SamplingBatch | None = None,
        mask: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        """Enqueue sampling for the rows of the batch; logits stay on the device.

        Call it once per step, also when no row samples. A row's token is kept on the device for the
        next step's ``-1``.

        Args:
            sampling: replaces the batch's own (late sampling); None keeps it.
            mask: packed grammar mask, uint32 ``[n, ceil(vocab / 32)]``, bit 1 allows; rows whose
                ``has_mask`` is false are not masked. None when no row has one.
        """

    @abc.abstractmethod
    def result(self) -> StepResult:
        """Wait for the step and read it. Calling it again returns the same result."""


class Runner(abc.ABC):
    """Runs steps of one model over one KV pool."""

    @abc.abstractmethod
    def warm_up(self, buckets: Sequence[int]) -> None:
        """Do ahead of the first request what would slow it down: capture, tune, touch."""

    @abc.abstractmethod
    def launch(self, batch: Batch) -> Step:
        """Start a step; at most two may be in flight."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what the runner holds."""


class Device(abc.ABC):
    """A device that is open."""

    @property
    @abc.abstractmethod
    def info(self) -> DeviceInfo:
        """Which device this is."""

    @abc.abstractmethod
    def memory(self) -> Memory:
        """Memory as it is now."""

    @abc.abstractmethod
    def load(self, model: Model, checkpoint: Checkpoint, plan: Plan, progress: Any = None) -> LoadedModel:
        """Bring a model's weights onto the device.

        Args:
            model: what the weights are for.
            checkpoint: where they are.
            plan: dtype, formats and fallback.
            progress: called with ``(bytes done, bytes in all)`` now and then, or None.
        """

    @abc.abstractmethod
    def activation_bytes(self, loaded: LoadedModel, plan: Plan) -> int:
        """Peak of the largest step beyond weights and pool, measured by a dry run where possible."""

    @abc.abstractmethod
    def plan_memory(self, request: MemoryRequest) -> MemoryPlan:
        """Divide the memory by the platform's policy.

        Raises:
            MemoryPlanError: the least pool does not fit, or capacity is unknown.
        """

    @abc.abstractmethod
    def allocate_kv(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> KVPool:
        """Allocate a pool of ``num_slots`` slots (padding page included) and tables of ``num_rows`` rows."""

    @abc.abstractmethod
    def runner(self, loaded: LoadedModel, pool: KVPool, plan: Plan) -> Runner:
        """A runner for a loaded model over a pool."""

    def under_pressure(self) -> bool:
        """Whether memory is short right now, so that cached prefixes should be given up."""
        return False

    def transfer(self, copies: Sequence[tuple[int, int]], after: Step | None = None) -> Any:
        """Copy pages between the device and host memory.

        Raises:
            UnsupportedError: the device has no host tier.
        """
        raise UnsupportedError(f"{self.info.name} has no host tier for the KV cache. Run without one.")

    @abc.abstractmethod
    def close(self) -> None:
        """Give the device back."""
