"""Drives a runner by hand: keeps slots and rows of a few sequences, and makes the batches that a scheduler would.

It knows no scheduler and no engine, so that a fault it finds is the runner's or the platform's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig
from cardan.models import build_model
from cardan.platform.resolve import platform_facts, resolve
from cardan.runner import open_device
from cardan.types import Batch, ForwardMode, KVLayout, PromptLogprobs, SamplingBatch, StepResult, TableDelta
from cardan.weights import open_checkpoint

NUM_SLOTS = 8192
NUM_ROWS = 12


def greedy(rows: np.ndarray, positions: np.ndarray, vocab: int, **changes: Any) -> SamplingBatch:
    """Greedy sampling for rows, with some fields changed."""
    n = len(rows)
    fields: dict[str, Any] = {
        "row_ids": rows.astype(np.int32),
        "temperature": np.zeros(n, np.float32),
        "top_k": np.full(n, vocab, np.int32),
        "top_p": np.ones(n, np.float32),
        "min_p": np.zeros(n, np.float32),
        "seeds": np.arange(n, dtype=np.uint64),
        "positions": positions.astype(np.int32),
        "frequency_penalty": np.zeros(n, np.float32),
        "presence_penalty": np.zeros(n, np.float32),
        "repetition_penalty": np.ones(n, np.float32),
        "bias_index": np.zeros(0, np.int32),
        "bias_ids": np.zeros(0, np.int32),
        "bias_values": np.zeros(0, np.float32),
        "want_logprobs": np.zeros(n, np.bool_),
        "top_logprobs": np.zeros(n, np.int32),
        "has_mask": np.zeros(n, np.bool_),
    }
    return SamplingBatch(**{**fields, **changes})


class RunnerHarness:
    """A model on a platform, and sequences over scattered slots."""

    def __init__(
        self, model: Path, platform: Any, dtype: str = "float32", options: dict[str, Any] | None = None,
        kv_cache_dtype: str = "auto", **model_settings: Any,
    ) -> None:  # fmt: skip
        config = EngineConfig(
            platform=PlatformConfig(kv_cache_dtype=kv_cache_dtype),
            model=ModelConfig(model=str(model), dtype=dtype, **model_settings),  # type: ignore[arg-type]
            cache=CacheConfig(max_total_tokens=NUM_SLOTS),
        )
        self.checkpoint = open_checkpoint(config.model)
        self.model = build_model(self.checkpoint.config, "model", self.checkpoint.tensor_info())
        info = platform.devices()[0]
        self.plan = resolve(config, self.model.facts, platform_facts(platform, info, self.model.facts))
        self.device = open_device(platform, info, {**self.plan.platform_options, "threads": 1, **(options or {})})
        self.loaded = self.device.load(self.model, self.checkpoint, self.plan)
        self.vocab = self.model.facts.vocab_size
        layout = KVLayout(layers=self.model.facts.layers, page_size=1, dtype=self.plan.kv_cache_dtype)
        self.pool = self.device.allocate_kv(layout, NUM_SLOTS, NUM_ROWS, self.plan.context_length)
        self.runner = self.device.runner(self.loaded, self.pool, self.plan)
        self._free = np.random.default_rng(0).permutation(np.arange(1, NUM_SLOTS)).astype(np.int32)
        self.slots: dict[int, np.ndarray] = {}

    def batch(
        self, parts: list[tuple[int, list[int]]], *, all_logits: bool = False, prompt: PromptLogprobs | None = None,
        mode: ForwardMode | None = None, **sampling: Any,
    ) -> Batch:  # fmt: skip
        """New tokens of rows: ``(row, ids)``; the rows grow. Without ``all_logits`` each row samples."""
        deltas, out_slots, positions, lengths = [], [], [], []
        for row, ids in parts:
            before = self.slots.get(row, np.zeros(0, np.int32))
            fresh, self._free = self._free[: len(ids)], self._free[len(ids) :]
            deltas.append(TableDelta(row_id=row, start=len(before), slots=fresh[None]))
            self.slots[row] = np.concatenate((before, fresh))
            out_slots.append(fresh)
            positions.append(np.arange(len(before), len(before) + len(ids)))
            lengths.append(len(self.slots[row]))
        counts = [len(ids) for _, ids in parts]
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        rows = np.array([row for row, _ in parts], np.int32)
        decode = all(count == 1 for count in counts)
        return Batch(
            mode=mode or (ForwardMode.DECODE if decode else ForwardMode.EXTEND),
            input_ids=np.concatenate([ids for _, ids in parts]).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            query_starts=starts,
            seq_lens=np.array(lengths, np.int32),
            row_ids=rows,
            out_slots=np.concatenate(out_slots)[None],
            table_deltas=tuple(deltas),
            logits_at=np.arange(starts[-1], dtype=np.int32) if all_logits else starts[1:] - 1,
            sampling=None if all_logits else greedy(rows, np.array(lengths), self.vocab, **sampling),
            prompt_logprobs=prompt,
        )

    def share(self, row: int, other: int, length: int) -> None:
        """Let a row start with the slots of another's first tokens, as a prefix cache does."""
        self.slots[row] = self.slots[other][:length]
        delta = TableDelta(row_id=row, start=0, slots=self.slots[row][None])
        self.pool.pool.update_tables((delta,))

    def logits(self, *parts: tuple[int, list[int]]) -> np.ndarray:
        """Logits at every new token."""
        step = self.runner.launch(self.batch(list(parts), all_logits=True))
        return self.device.device.ops.to_host(step._logits)

    def step(self, *parts: tuple[int, list[int]], **changes: Any) -> StepResult:
        """Run a step that samples."""
        step = self.runner.launch(self.batch(list(parts), **changes))
        step.sample()
        return step.result()

    def generate(self, row: int, ids: list[int], count: int) -> list[int]:
        """Greedy tokens of one sequence, each taken from the device by -1."""
        tokens = [int(self.step((row, ids)).tokens[0])]
        while len(tokens) < count:
            tokens.append(int(self.step((row, [-1])).tokens[0]))
        return tokens
