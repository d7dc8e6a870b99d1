"""The level-1 example alone: what it plans for a step covers what the step takes, and late sampling is honoured."""

from __future__ import annotations

import contextlib
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig
from cardan.engine.preparation import Prepared, prepare
from cardan.platform.tuned_tables import TuningTable, write_table
from cardan.testing import write_tiny_model
from cardan.types import Batch, ForwardMode, SamplingBatch, TableDeltas

EXAMPLE = Path(__file__).parents[2] / "examples" / "vendor_device"
CONTEXT = 256


@pytest.fixture
def beacon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package, from its sources."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import beacon_cardan
    import beacon_cardan.device

    yield beacon_cardan
    for name in [name for name in sys.modules if name.startswith("beacon_cardan")]:
        sys.modules.pop(name)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def greedy(*rows: int) -> SamplingBatch:
    n = len(rows)
    ones, zeros = np.ones(n, np.float32), np.zeros(n, np.float32)
    return SamplingBatch(
        row_ids=ints(*rows), temperature=zeros, top_k=np.full(n, 5, np.int32), top_p=ones, min_p=zeros,
        seeds=np.zeros(n, np.uint64), positions=np.zeros(n, np.int32), frequency_penalty=zeros, presence_penalty=zeros,
        repetition_penalty=ones, bias_index=ints(), bias_ids=ints(), bias_values=zeros[:0],
        want_logprobs=np.zeros(n, bool), top_logprobs=np.zeros(n, np.int32), has_mask=np.zeros(n, bool),
    )  # fmt: skip


def start(beacon: Any, folder: Path, chunk: int, rows: int) -> Prepared:
    config = EngineConfig(
        model=ModelConfig(model=str(write_tiny_model(folder / "tiny", CONTEXT)), random_weights=1),
        platform=PlatformConfig(platform="beacon"),
        cache=CacheConfig(max_total_tokens=2048),
        scheduler=SchedulerConfig(chunked_prefill_size=chunk, max_prefill_tokens=1024, max_running_requests=rows),
    )
    return prepare(config, platform=beacon.platform)


def prefill(tokens: int, rows: int, sampled: int) -> Batch:
    """The first tokens of ``rows`` rows, ``tokens`` in all; the first ``sampled`` rows get one."""
    counts = np.full(rows, tokens // rows)
    counts[: tokens % rows] += 1
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    positions = np.concatenate([np.arange(count) for count in counts]).astype(np.int32)
    slots = np.arange(1, tokens + 1, dtype=np.int32)[None]
    ids = np.arange(1, rows + 1, dtype=np.int32)
    return Batch(
        mode=ForwardMode.EXTEND,
        input_ids=np.arange(tokens, dtype=np.int32) % 256,
        positions=positions,
        query_starts=starts,
        seq_lens=counts.astype(np.int32),
        row_ids=ids,
        out_slots=slots,
        table_deltas=TableDeltas(rows=np.repeat(ids, counts), positions=positions, slots=slots),
        logits_at=starts[1 : sampled + 1] - 1,
        sampling=greedy(*ids[:sampled]) if sampled else None,
    )


@pytest.mark.parametrize(("chunk", "tokens"), [(64, 64), (-1, 1024)], ids=["chunked", "unchunked"])
def test_the_largest_step_takes_what_was_planned(beacon: Any, tmp_path: Path, chunk: int, tokens: int) -> None:
    """With chunks switched off a pass may take the prompts of several requests."""
    prepared = start(beacon, tmp_path, chunk, rows=8)
    planned = prepared.device.activation_bytes(prepared.loaded, prepared.plan)
    for batch in (prefill(tokens, 8, 8), prefill(min(tokens, CONTEXT), 1, 1)):
        tracemalloc.start()
        step = prepared.runner.launch(batch)
        step.sample()
        step.result()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak <= planned
    # and it is no guess far above what is needed
    assert planned <= 4 * largest_of(prepared, tokens)
    prepared.close()


def largest_of(prepared: Prepared, tokens: int) -> int:
    """Bytes of the widest arrays of a step that must be there at once: gate and up, the stream, and the logits."""
    facts = prepared.plan.model
    return 4 * (tokens * (3 * facts.intermediate_size + 2 * facts.hidden_size) + 8 * facts.vocab_size)


def test_many_rows_and_a_wide_vocabulary_are_planned_for(beacon: Any, tmp_path: Path) -> None:
    prepared = start(beacon, tmp_path, 64, rows=8)
    plan, device = prepared.plan, prepared.device
    wide = replace(plan, model=replace(plan.model, vocab_size=plan.model.vocab_size + 1000))
    more = device.activation_bytes(prepared.loaded, wide) - device.activation_bytes(prepared.loaded, plan)
    assert more >= 8 * 1000 * 4
    prepared.close()


def test_late_sampling_replaces_the_batch_s_own(beacon: Any) -> None:
    pool = SimpleNamespace(last=np.full(5, -5, np.int32))
    logits = np.array([[0, 1, 0], [np.nan, 0, 0]], np.float32)
    own, late, none = (
        beacon.device.BeaconStep(pool, logits, sampling) for sampling in (greedy(1, 2), greedy(1, 2), None)
    )
    own.sample()
    assert pool.last.tolist() == [-5, 1, 0, -5, -5]
    late.sample(greedy(4, 3))
    assert pool.last.tolist() == [-5, 1, 0, 0, 1]
    assert late.result().tokens.tolist() == [1, 0]
    assert late.result().failed.tolist() == [False, True]
    none.sample()
    assert none.result().tokens.tolist() == []
    assert none.result().failed.tolist() == []


def test_what_was_tuned_reaches_the_program(beacon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARDAN_CACHE", str(tmp_path))
    with contextlib.closing(start(beacon, tmp_path, chunk=64, rows=2)) as prepared:
        assert prepared.device.head_rows == beacon.tuning.HEAD_ROWS.default
    write_table(
        TuningTable(
            platform="beacon",
            processor="Beacon B1",
            kernels="beacon-cardan 1.0.0",
            date="2026-11-30",
            numbers={"head_rows": 64},
        ),
        tmp_path,
    )
    with contextlib.closing(start(beacon, tmp_path, chunk=64, rows=2)) as prepared:
        assert prepared.device.head_rows == 64
        assert prepared.plan.settings["tuning"].why == "tuned on 2026-11-30 for Beacon B1, beacon-cardan 1.0.0"


def test_a_tuned_platform_keeps_what_its_options_set(beacon: Any) -> None:
    configured = beacon.BeaconPlatform()
    configured.asked_for = "blue"
    tuned = configured.tuned({"head_rows": 64})
    assert (tuned.asked_for, tuned.numbers, dict(configured.numbers)) == ("blue", {"head_rows": 64}, {})


def test_a_slow_first_call_decides_nothing(beacon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each call moves: the first of each size by much, others by less where pieces are of 1024."""
    now, seen = 0.0, set()

    def multiply(x: Any, head: Any, rows: int) -> None:
        nonlocal now
        now += (1 if rows == 1024 else 2) if rows in seen else {256: 10, 1024: 40, 4096: 20, 16384: 30}[rows]
        seen.add(rows)

    monkeypatch.setattr(beacon.tuning, "multiply", multiply)
    monkeypatch.setattr(beacon.tuning.time, "perf_counter", lambda: now)
    assert beacon.tuning.BeaconTuner().measure((), lambda *_: None) == {"head_rows": 1024}


def test_the_head_is_the_same_in_pieces_of_any_size(beacon: Any) -> None:
    rng = np.random.default_rng(0)
    x, head = rng.integers(-8, 8, (3, 16)).astype(np.float32), rng.integers(-8, 8, (100, 16)).astype(np.float32)
    for rows in (1, 7, 64, 100, 4096):
        assert np.array_equal(beacon.tuning.multiply(x, head, rows), x @ head.T)
