"""Copies of the CPU platform with one fault planted in each, for tests of the conformance suite.

Each fault sits where a platform's author would make it: in an operation, a linear, the pool, the runner, the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cardan.errors import MemoryPlanError, UnsupportedError
from cardan.platform import (
    AttentionBackend,
    AttentionMeta,
    Capabilities,
    Capability,
    CapturedStep,
    DeviceInfo,
    Evidence,
    Feature,
    GraphRunner,
    KVPool,
    LinearMethod,
    LinearSpec,
    LoadedModel,
    MemoryPlan,
    MemoryPolicy,
    MemoryRequest,
    OpsKVPool,
    PackedWeight,
    Plan,
    Runner,
    SharedMemoryPolicy,
    Step,
    Support,
)
from cardan.runner import NeutralDevice
from cardan.types import Batch, KVLayout, SamplingBatch, StepResult, TableDelta, TensorView
from cardan_cpu.cpu_platform import CpuPlatform
from cardan_cpu.device import CpuDevice
from cardan_torch import DenseLinear, DenseWeight, TorchAttention, TorchKVPool, TorchOps


class CpuCopy(CpuPlatform):
    """The CPU platform over a device class of the test's own."""

    def __init__(self, device: Callable[[DeviceInfo], Any], features: Mapping[str, Capability] | None = None) -> None:
        self.asked = "torch"
        self._device = device
        self._more = features or {}

    def configured(self, options: Mapping[str, Any]) -> CpuCopy:
        return self

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        answers = super().capabilities(device)
        return replace(answers, features={**answers.features, **self._more})

    def open(self, device: DeviceInfo, options: Mapping[str, Any]) -> Any:
        return self._device(device)


class OneThread(CpuDevice):
    """The CPU device on one thread: shapes are tiny."""

    def __init__(self, info: DeviceInfo) -> None:
        super().__init__(info, threads=1)


# --- operations ---------------------------------------------------------------------------------


class RopeOffByOne(TorchOps):
    def rope_prepare(self, positions: torch.Tensor, cos: Any, sin: Any, interleaved: bool) -> Any:
        return super().rope_prepare((positions + 1).clamp(max=cos.shape[0] - 1), cos, sin, interleaved)


class RopeTwice(TorchOps):
    def rope_apply(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        once = super().rope_apply(x, prepared)
        # the recursion over the rotated features must not rotate four times
        return once if prepared.cos.shape[-1] < x.shape[-1] else super().rope_apply(once, prepared)


class NarrowRopeTwice(RopeTwice):
    """Only where activations are narrow."""

    def rope_apply(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        apply = TorchOps.rope_apply if x.dtype is torch.float32 else RopeTwice.rope_apply
        return apply(self, x, prepared)


def with_ops(make: type[TorchOps]) -> type[OneThread]:
    class Device(OneThread):
        def __init__(self, info: DeviceInfo) -> None:
            super().__init__(info)
            self._ops = make(self.torch_device)

    return Device


# --- linears ------------------------------------------------------------------------------------


class LeakyWeight(DenseWeight):
    """A tile of 32 columns whose last lanes were never cleared; the last output row reads them."""

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        out = super().apply(x)
        if x.shape[-1] % 32:
            out[..., -1] += torch.full((), torch.nan) * 0
        return out


class LeakyLinear(DenseLinear):
    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> DenseWeight:
        return LeakyWeight(weight, bias)


class LeakyDevice(OneThread):
    def linear_methods(self) -> tuple[LinearMethod, ...]:
        return (LeakyLinear("cpu"),)


def dropping(columns: int) -> type[DenseLinear]:
    """A linear that leaves the last columns out where there are many: a tail that no tile covers."""

    class Short(DenseWeight):
        def apply(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[-1] < 2048:
                return super().apply(x)
            return torch.nn.functional.linear(x[:, :-columns], self.weight[:, :-columns], self.bias)

    class ShortLinear(DenseLinear):
        def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> DenseWeight:
            return Short(weight, bias)

    return ShortLinear


class OddLinear(DenseLinear):
    """Takes every shape, it says, and then not 499 columns."""

    def pack(self, views: Sequence[TensorView], spec: LinearSpec, bias: torch.Tensor | None) -> PackedWeight:
        if spec.in_features == 499:
            raise UnsupportedError("499 columns are prime.")
        return super().pack(views, spec, bias)


def with_linear(make: type[DenseLinear]) -> type[OneThread]:
    class Device(OneThread):
        def linear_methods(self) -> tuple[LinearMethod, ...]:
            return (make("cpu"),)

    return Device


class OneLayerDevice(OneThread):
    """Has attention for one layer only, and says nothing of it."""

    def attention(self, name: str, pool: OpsKVPool, layout: KVLayout, dtype: str) -> AttentionBackend:
        if len(layout.layers) > 1:
            raise UnsupportedError("There is room for one layer.")
        return super().attention(name, pool, layout, dtype)


# --- the pool -----------------------------------------------------------------------------------


class OnePagePool(TorchKVPool):
    """Takes a row's pages to follow each other."""

    def __init__(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int, device: Any) -> None:
        super().__init__(layout, num_slots, num_rows, max_length, device)
        self._page, self._num_slots = layout.page_size, num_slots

    def update_tables(self, deltas: Sequence[TableDelta]) -> None:
        super().update_tables(deltas)
        if self._page > 1:
            first = self.tables[:, :, :1] // self._page * self._page
            guessed = (first + torch.arange(self.tables.shape[-1])) % self._num_slots
            self.tables[:, :, self._page :] = guessed[:, :, self._page :]


class NanInSlotZero(TorchKVPool):
    def __init__(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int, device: Any) -> None:
        super().__init__(layout, num_slots, num_rows, max_length, device)
        for leaf in self.leaves():
            leaf[0] = torch.nan


class UnzeroedPool(TorchKVPool):
    """Allocates and does not fill."""

    def __init__(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int, device: Any) -> None:
        super().__init__(layout, num_slots, num_rows, max_length, device)
        self.values[-1][-1] = 7.0


class BoundToItself(TorchKVPool):
    def bind(self, leaves: Sequence[torch.Tensor]) -> None:
        return


class BoastfulPool(TorchKVPool):
    @property
    def num_bytes(self) -> int:
        return 10 * super().num_bytes


class OneGroupPool(TorchKVPool):
    """Has tables for each group, and reads the first one's."""

    def update_tables(self, deltas: Sequence[TableDelta]) -> None:
        super().update_tables(deltas)
        self.tables[1:] = self.tables[:1]


def with_pool(make: type[TorchKVPool]) -> type[OneThread]:
    class Device(OneThread):
        def allocate_kv(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> OpsKVPool:
            return make(layout, num_slots, num_rows, max_length, self.torch_device)

    return Device


# --- attention ---------------------------------------------------------------------------------


class WarmAttention(TorchAttention):
    """Scores are a thousandth too large."""

    def forward(self, q: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return super().forward(q * 1.001, *arguments)


class WarmDevice(OneThread):
    def attention(self, name: str, pool: OpsKVPool, layout: KVLayout, dtype: str) -> AttentionBackend:
        return WarmAttention(pool)


# --- the runner ---------------------------------------------------------------------------------


class ChangedRunner(Runner):
    """A runner that samples with other parameters than it is given."""

    def __init__(self, runner: Runner, change: Callable[[SamplingBatch], SamplingBatch]) -> None:
        self._runner = runner
        self._change = change

    def warm_up(self, buckets: Sequence[int]) -> None:
        self._runner.warm_up(buckets)

    def launch(self, batch: Batch) -> Step:
        if batch.sampling is not None:
            batch = replace(batch, sampling=self._change(batch.sampling))
        return self._runner.launch(batch)

    def close(self) -> None:
        self._runner.close()


def with_sampling(change: Callable[[SamplingBatch], SamplingBatch]) -> Callable[[DeviceInfo], NeutralDevice]:
    class Device(NeutralDevice):
        def runner(self, loaded: LoadedModel, pool: KVPool, plan: Plan) -> Runner:
            return ChangedRunner(super().runner(loaded, pool, plan), change)

    return lambda info: Device(OneThread(info))


def no_top_p(sampling: SamplingBatch) -> SamplingBatch:
    return replace(sampling, top_p=np.ones_like(sampling.top_p))


def no_penalties(sampling: SamplingBatch) -> SamplingBatch:
    none = np.zeros_like(sampling.frequency_penalty)
    return replace(
        sampling,
        frequency_penalty=none,
        presence_penalty=none,
        repetition_penalty=np.ones_like(none),
        penalty_seeds=(),
    )


def seeds_by_company(sampling: SamplingBatch) -> SamplingBatch:
    """Noise that depends on how many rows are drawn at once."""
    return replace(sampling, seeds=sampling.seeds + np.uint64(len(sampling.seeds)))


class DeafStep(Step):
    """Shows logits, and samples from the model's own whatever it is given."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def logits(self, rows: Sequence[int]) -> Any:
        return self._step.logits(rows)

    def sample(self, sampling: SamplingBatch | None = None, mask: Any = None) -> None:
        self._step.sample(None if sampling is None else replace(sampling, given_logits=None), mask)

    def result(self) -> StepResult:
        return self._step.result()


class DeafRunner(ChangedRunner):
    def launch(self, batch: Batch) -> Step:
        return DeafStep(super().launch(batch))


class LateStates(ChangedRunner):
    """Hidden states of tokens are those of the tokens behind them."""

    def launch(self, batch: Batch) -> Step:
        if batch.hidden_at is not None:
            batch = replace(batch, hidden_at=np.minimum(batch.hidden_at + 1, batch.num_tokens - 1).astype(np.int32))
        return super().launch(batch)


def with_runner(make: type[ChangedRunner]) -> Callable[[DeviceInfo], NeutralDevice]:
    class Device(NeutralDevice):
        def runner(self, loaded: LoadedModel, pool: KVPool, plan: Plan) -> Runner:
            return make(super().runner(loaded, pool, plan), lambda sampling: sampling)

    return lambda info: Device(OneThread(info))


# --- memory -------------------------------------------------------------------------------------


class FloorPolicy(MemoryPolicy):
    """Gives at least 4,096 slots, whatever there is."""

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        try:
            return SharedMemoryPolicy().plan(request)
        except MemoryPlanError:
            slots = max(4096, request.min_slots) // request.page_size * request.page_size
            pool_bytes = (slots + request.page_size) * request.bytes_per_slot
            return MemoryPlan(num_slots=slots, pool_bytes=pool_bytes, lines=(("floor", pool_bytes, "at least this"),))


class TimidPolicy(MemoryPolicy):
    """Shares nothing, and gives no pool of a stated size either."""

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        if request.memory.shared or request.memory.free is None:
            raise MemoryPlanError("Someone else might need it. Pass --max-total-tokens.")
        return SharedMemoryPolicy().plan(request)


class TimidDevice(OneThread):
    def memory_policy(self) -> MemoryPolicy:
        return TimidPolicy()


class FloorDevice(OneThread):
    def memory_policy(self) -> MemoryPolicy:
        return FloorPolicy()


# --- graphs -------------------------------------------------------------------------------------


class RecordingGraph(GraphRunner):
    """Pads decode steps to powers of two and runs them again from what it recorded of each bucket.

    With ``stale`` it keeps the lengths that a bucket had when it was recorded.
    """

    def __init__(self, ops: TorchOps, backend: AttentionBackend, step: CapturedStep, stale: bool) -> None:
        self._ops, self._backend, self._step, self._stale = ops, backend, step, stale
        self._lengths: dict[int, Any] = {}

    def can_replay(self, meta: AttentionMeta) -> bool:
        return len(meta.row_ids) <= 16

    def replay(self, input_ids: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        count = len(meta.row_ids)
        rows = 1 << (count - 1).bit_length()
        padded = self._padded(meta, rows)
        if self._stale:
            recorded = self._lengths.setdefault(rows, padded.seq_lens)
            padded = replace(padded, seq_lens=np.minimum(recorded, padded.seq_lens))
        ids = torch.cat((input_ids, input_ids.new_zeros(rows - count)))
        positions = self._ops.from_host(padded.positions)
        return self._step(ids, positions, self._backend.plan(padded))[:count]

    def _padded(self, meta: AttentionMeta, rows: int) -> AttentionMeta:
        more = rows - len(meta.row_ids)
        zeros, ones = np.zeros(more, np.int32), np.ones(more, np.int32)
        return replace(
            meta,
            query_starts=np.arange(rows + 1, dtype=np.int32),
            seq_lens=np.concatenate((meta.seq_lens, ones)),
            row_ids=np.concatenate((meta.row_ids, zeros)),
            positions=np.concatenate((meta.positions, zeros)),
            out_slots=np.concatenate((meta.out_slots, np.tile(zeros, (len(meta.out_slots), 1))), axis=1),
        )


class ShyGraph(RecordingGraph):
    """Has a bucket for nothing."""

    def can_replay(self, meta: AttentionMeta) -> bool:
        return False


def with_graph(*, stale: bool, make: type[RecordingGraph] = RecordingGraph) -> type[OneThread]:
    class Device(OneThread):
        def graph_runner(self, pool: OpsKVPool, backend: AttentionBackend, step: CapturedStep) -> GraphRunner:
            return make(self._ops, backend, step, stale)

    return Device


NATIVE = Capability(Support.NATIVE, "claimed", Evidence.NONE)
GRAPH = {str(Feature.GRAPH): Capability(Support.NATIVE, "recorded decode steps", Evidence.SIMULATOR)}
