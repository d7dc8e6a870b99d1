"""A table of logits on a device, as a model, with a runner over it.

It knows no sampler.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cardan.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from cardan.errors import UnsupportedError, UnsupportedModelError
from cardan.ops import round_to
from cardan.ops.definitions import NumpyArray
from cardan.platform import Runner, Step
from cardan.references.logit_table import CONTEXT, LAYER, VOCAB, ArrayCheckpoint, LogitModel
from cardan.testing.conformance.check import CheckError, NotApplicableError
from cardan.testing.conformance.subject import Subject
from cardan.types import Batch, ForwardMode, Int32Array, KVLayout, SamplingBatch, TableDelta

MAX_ROWS = 64
MOST_STEPS = 8
"""Positions that a row is stepped through at most."""


def make_table(dtype: str) -> NumpyArray:
    """Logits ``[VOCAB, VOCAB]`` that the type holds exactly: rows from flat to peaked."""
    rng = np.random.default_rng(21)
    spread = np.linspace(0.5, 6.0, VOCAB)[:, None]
    return round_to(rng.standard_normal((VOCAB, VOCAB)) * spread, dtype)


class LogitBench:
    """The table on a device, and a runner over it; use it as a context manager.

    Attributes:
        table: float64 logits by token.
        runner: launches steps.
    """

    def __init__(self, subject: Subject, table: NumpyArray | None = None) -> None:
        """Load the table.

        Raises:
            NotApplicableError: the device does not load a model that it was not compiled for.
            CheckError: it refuses what every device that supplies ops can load.
        """
        if not subject.platform.reads_weights:
            raise NotApplicableError("the platform reads no weights, so there are no logits to choose")
        dtype = subject.best_dtype
        self.table = make_table(dtype) if table is None else table
        model = LogitModel()
        config = EngineConfig(
            model=ModelConfig(dtype=dtype),  # type: ignore[arg-type]
            platform=subject.platform_config(dtype),
            cache=CacheConfig(max_total_tokens=CONTEXT * max(subject.capabilities.page_sizes)),
            scheduler=SchedulerConfig(max_running_requests=MAX_ROWS),
        )
        plan = subject.plan(model.facts, config)
        device = subject.device
        try:
            loaded = device.load(model, ArrayCheckpoint({}, {"table": self.table}), plan)
        except UnsupportedModelError as error:
            if subject.level == 1:
                raise NotApplicableError(f"the device does not load a model made for the suite: {error}") from error
            raise CheckError(f"a device that supplies ops runs any model, but one was refused: {error}") from error
        except UnsupportedError as error:
            raise CheckError(
                f"a table of [{VOCAB}, {VOCAB}] float32 logits was refused, which any device must take: {error}"
            ) from error
        layout = KVLayout(layers=(LAYER,), page_size=plan.page_size, dtype=plan.kv_cache_dtype)
        self._span = -(-MOST_STEPS // plan.page_size) * plan.page_size
        pool = device.allocate_kv(layout, (MAX_ROWS + 2) * self._span, MAX_ROWS + 1, CONTEXT)
        self.runner: Runner = device.runner(loaded, pool, plan)

    def __enter__(self) -> LogitBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()

    def step(self, ids: Int32Array, sampling: SamplingBatch, mask: Any = None, position: int = 0) -> Any:
        """Run one token of each row and sample from what it gives; returns the ``StepResult``."""
        return self.launch(ids, sampling, mask, position).result()

    def launch(self, ids: Int32Array, sampling: SamplingBatch, mask: Any = None, position: int = 0) -> Any:
        """The same without waiting; returns the ``Step``."""
        step = self.open(ids, sampling, position)
        step.sample(mask=mask)
        return step

    def open(self, ids: Int32Array, sampling: SamplingBatch, position: int = 0) -> Step:
        """The same without sampling."""
        count = len(ids)
        slots = (sampling.row_ids * self._span + position).astype(np.int32)
        batch = Batch(
            mode=ForwardMode.EXTEND if position == 0 else ForwardMode.DECODE,
            input_ids=np.asarray(ids, np.int32),
            positions=np.full(count, position, np.int32),
            query_starts=np.arange(count + 1, dtype=np.int32),
            seq_lens=np.full(count, position + 1, np.int32),
            row_ids=sampling.row_ids,
            out_slots=slots[None],
            table_deltas=tuple(
                TableDelta(row_id=int(row), start=position, slots=slot.reshape(1, 1))
                for row, slot in zip(sampling.row_ids, slots, strict=True)
            ),
            logits_at=np.arange(count, dtype=np.int32),
            sampling=sampling,
        )
        return self.runner.launch(batch)


def sampling_batch(count: int, **changes: Any) -> SamplingBatch:
    """Greedy sampling for rows ``1 .. count`` with some fields changed; a scalar stands for all rows."""
    fields: dict[str, Any] = {
        "row_ids": np.arange(1, count + 1, dtype=np.int32),
        "temperature": 0.0,
        "top_k": VOCAB,
        "top_p": 1.0,
        "min_p": 0.0,
        "seeds": np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1000),
        "positions": np.arange(count, dtype=np.int32) + 5,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "bias_index": np.zeros(0, np.int32),
        "bias_ids": np.zeros(0, np.int32),
        "bias_values": np.zeros(0, np.float32),
        "want_logprobs": False,
        "top_logprobs": 0,
        "has_mask": False,
    }
    kinds = {"top_k": np.int32, "top_logprobs": np.int32, "want_logprobs": np.bool_, "has_mask": np.bool_}
    fields |= changes
    for name, value in fields.items():
        if name not in ("penalty_seeds", "logprob_token_ids") and not isinstance(value, np.ndarray):
            fields[name] = np.broadcast_to(np.asarray(value, kinds.get(name, np.float32)), (count,)).copy()
    return SamplingBatch(**fields)
