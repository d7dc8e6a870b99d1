"""Turns an ``OpsDevice`` (ops and providers) into a ``Device`` that the engine can use.

It knows no array library and no platform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cardan.platform import (
    Checkpoint,
    Device,
    DeviceInfo,
    KVPool,
    LoadedModel,
    Memory,
    MemoryPlan,
    MemoryRequest,
    Model,
    OpsDevice,
    OpsKVPool,
    Plan,
    Platform,
    Runner,
)
from cardan.runner.loading import Progress, WeightLoader, Weights
from cardan.runner.memory_formula import StepSizes, memory_formula, sampling_bytes
from cardan.runner.runner import NeutralRunner, padding_batch
from cardan.types import Array, KVLayout


class NeutralModel(LoadedModel):
    """A model and its weights on an ops device.

    Attributes:
        model: the model.
        weights: packed weights and vectors by name.
        ropes: per RoPE table: cosines, sines and whether pairs are interleaved.
    """

    def __init__(self, model: Model, weights: Weights, ropes: Sequence[tuple[Array, Array, bool]], rope_bytes: int):
        self.model = model
        self.weights = weights.arrays
        self.ropes = tuple(ropes)
        self._num_bytes = weights.num_bytes + rope_bytes
        self._notes = weights.notes

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights and RoPE tables."""
        return self._num_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """What loading decided."""
        return self._notes


class NeutralPool(KVPool):
    """A device's pool, with what a runner must know of it.

    Attributes:
        pool: the device's own.
        layout: what it holds.
        num_rows: rows of its tables.
    """

    def __init__(self, pool: OpsKVPool, layout: KVLayout, num_rows: int) -> None:
        self.pool = pool
        self.layout = layout
        self.num_rows = num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self.pool.num_bytes


class NeutralDevice(Device):
    """An ops device with the neutral loader and runner around it."""

    def __init__(self, device: OpsDevice) -> None:
        self.device = device

    @property
    def info(self) -> DeviceInfo:
        """Which device this is."""
        return self.device.info

    def memory(self) -> Memory:
        """Memory as it is now."""
        return self.device.memory()

    def load(self, model: Model, checkpoint: Checkpoint, plan: Plan, progress: Progress | None = None) -> NeutralModel:
        """See ``Device.load``.

        Raises:
            CheckpointError: a tensor is missing or has another shape than the model expects.
            UnsupportedError: a format is not taken and the plan refuses to widen.
        """
        loader = WeightLoader(
            self.device,
            checkpoint,
            plan.dtype,
            str(plan.value("quantization_fallback")),
            _made_at_load(plan),
        )
        with self.device.scope():
            weights = loader.load(model, progress)
            tables = model.rope_tables(plan.context_length)
            ops = self.device.ops
            ropes = [(ops.from_host(t.cos, "float32"), ops.from_host(t.sin, "float32"), t.interleaved) for t in tables]
        return NeutralModel(model, weights, ropes, sum(t.cos.nbytes + t.sin.nbytes for t in tables))

    def activation_bytes(self, loaded: LoadedModel, plan: Plan) -> int:
        """Peak of the largest step: measured where the device can, else by ``memory_formula``."""
        model = _own_model(loaded)
        sizes = largest_step(plan)
        formula = memory_formula(model.model.facts, sizes)
        measured = self.device.activation_peak(lambda: self._dry_run(model, plan, sizes.tokens))
        # a dry prefill samples few rows, if any; decode steps sample all that run
        return formula if measured is None else measured + sampling_bytes(model.model.facts, sizes)

    def _dry_run(self, loaded: NeutralModel, plan: Plan, tokens: int) -> None:
        """A prefill of ``tokens`` tokens over the padding slot, in as few rows as the context length allows."""
        whole, rest = divmod(tokens, plan.context_length)
        rows = np.array([plan.context_length] * whole + [rest] * (rest > 0), dtype=np.int32)
        layout = KVLayout(layers=loaded.model.facts.layers, page_size=plan.page_size, dtype=plan.kv_cache_dtype)
        pool = self.allocate_kv(layout, plan.page_size, 1, plan.context_length)
        runner = self.runner(loaded, pool, plan)
        step = runner.launch(padding_batch(layout.num_groups, rows))
        step.sample()
        step.result()
        runner.close()

    def plan_memory(self, request: MemoryRequest) -> MemoryPlan:
        """See ``Device.plan_memory``."""
        return self.device.memory_policy().plan(request)

    def allocate_kv(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> NeutralPool:
        """See ``Device.allocate_kv``."""
        return NeutralPool(self.device.allocate_kv(layout, num_slots, num_rows, max_length), layout, num_rows)

    def runner(self, loaded: LoadedModel, pool: KVPool, plan: Plan) -> Runner:
        """See ``Device.runner``."""
        model = _own_model(loaded)
        if not isinstance(pool, NeutralPool):
            raise TypeError(f"the pool must come from this device's allocate_kv, got {type(pool).__name__}")
        names = (str(plan.value(f"{phase}_attention_backend")) for phase in ("prefill", "decode"))
        prefill, decode = (self.device.attention(name, pool.pool, pool.layout, plan.dtype) for name in names)
        runner = NeutralRunner(
            self.device, model.model, model.weights, model.ropes, (pool.pool, pool.num_rows), (prefill, decode)
        )
        if plan.value("graph"):
            runner.capture_decode()
        if plan.overlap:
            runner.sample_without_waiting()
        return runner

    def under_pressure(self) -> bool:
        """Whether the policy calls memory short."""
        return self.device.memory_policy().under_pressure(self.device.memory())

    def close(self) -> None:
        """Give the device back."""
        self.device.close()


def largest_step(plan: Plan) -> StepSizes:
    """The most tokens and rows that one step of the plan can have."""
    chunk = plan.chunked_prefill_size
    prefill = int(plan.value("max_prefill_tokens")) if chunk < 0 else chunk
    rows = plan.max_running_requests
    return StepSizes(tokens=max(min(prefill, plan.context_length * rows), rows), rows=rows)


def open_device(platform: Platform, info: DeviceInfo, options: Mapping[str, Any]) -> Device:
    """Open a platform's device; one that supplies ops only is completed by the neutral runner."""
    opened = platform.open(info, options)
    return NeutralDevice(opened) if isinstance(opened, OpsDevice) else opened


def _made_at_load(plan: Plan) -> str | None:
    """The format that weights are to be quantized to, or None where the checkpoint's own are kept."""
    asked = plan.value("quantization")
    return None if asked is None or asked in plan.model.weight_formats else str(asked)


def _own_model(loaded: LoadedModel) -> NeutralModel:
    if not isinstance(loaded, NeutralModel):
        raise TypeError(f"the model must come from this device's load, got {type(loaded).__name__}")
    return loaded
