"""Decode steps as NPU graphs: buckets, padding rows, the cap on captured steps, and lengths that follow each step."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from cardan.platform import AttentionMeta
from cardan.types import ForwardMode, KVLayout, LayerKV, TableDelta

PAGE, ROWS, LENGTH = 128, 8, 512
WINDOW = 100


def layer(index: int, window: int | None = None, softcap: float | None = None) -> LayerKV:
    return LayerKV(index=index, q_heads=2, kv_heads=1, k_dim=16, v_dim=16, scale=0.25, window=window, softcap=softcap)


def meta(lengths: list[int], slots: np.ndarray) -> AttentionMeta:
    """A decode step of the first rows, whose tables are ``slots``."""
    count = len(lengths)
    ends = np.array(lengths, np.int32)
    rows = np.arange(count, dtype=np.int32)
    return AttentionMeta(
        mode=ForwardMode.DECODE,
        query_starts=np.arange(count + 1, dtype=np.int32),
        seq_lens=ends,
        row_ids=rows,
        positions=ends - 1,
        out_slots=slots[rows, ends - 1][None].astype(np.int32),
    )


class Setup:
    """A runner over layers, and the same step run eagerly."""

    def __init__(self, device, layers) -> None:
        import torch

        from cardan_npu.graph import NpuGraphRunner

        rng = np.random.default_rng(7)
        layout = KVLayout(layers=layers, page_size=PAGE, dtype="float16")
        pages = rng.permutation(ROWS * LENGTH // PAGE) + 1
        self.slots = (pages.reshape(ROWS, -1, 1) * PAGE + np.arange(PAGE)).reshape(ROWS, LENGTH)
        self.pool = device.allocate_kv(layout, (len(pages) + 1) * PAGE, ROWS, LENGTH)
        for row in range(ROWS):
            self.pool.update_tables([TableDelta(row_id=row, start=0, slots=self.slots[row][None].astype(np.int32))])
        for leaf in self.pool.leaves():
            leaf.copy_(torch.from_numpy(rng.normal(size=tuple(leaf.shape)).astype(np.float16)))
        self.backend = device.attention("fused", self.pool, layout, "float16")
        self.layers = layers
        self.table = device.ops.from_host(rng.normal(size=(64, 64)).astype(np.float32), "float16")
        self.device = device
        self.steps = 0
        self.runner = NpuGraphRunner(self.backend, self.step, device.graph_rows)

    def step(self, ids, positions, plan):
        """A model of attention alone: queries, keys and values are a token's row of a table."""
        self.steps += 1
        rows = self.table.index_select(0, ids)
        out = rows[:, :32] + positions[:, None].to(rows.dtype) * 0.01
        for each in self.layers:
            q, k, v = rows[:, :32].reshape(-1, 2, 16), rows[:, 32:48, None], rows[:, 48:, None]
            parts = q.contiguous(), k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
            out = out + self.backend.forward(*parts, each, plan)
        return out

    def both(self, lengths: list[int]):
        step = meta(lengths, self.slots)
        ids = self.device.ops.from_host(np.arange(len(lengths), dtype=np.int32) + 3)
        replayed = self.device.ops.to_host(self.runner.replay(ids, step)).copy()
        positions = self.device.ops.from_host(step.positions)
        eager = self.device.ops.to_host(self.step(ids, positions, self.backend.plan(step)))
        return replayed, eager


KINDS = {
    "full": (layer(0),),
    "window": (layer(0, window=WINDOW),),
    "both": (layer(0), layer(1, window=WINDOW), layer(2)),
    "torch": (layer(0, softcap=3.0),),
    "some-by-torch": (layer(0), layer(1, softcap=3.0), layer(2, window=WINDOW, softcap=3.0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_replays_equal_eager_steps_as_lengths_grow_and_rows_go(device, kind):
    setup = Setup(device, KINDS[kind])
    for lengths in ([5, 200, 129], [6, 201, 130], [127, 128], [128, 129], [512, 1, 99, 100], [300]):
        replayed, eager = setup.both(lengths)
        np.testing.assert_allclose(replayed, eager, atol=4e-3, rtol=4e-3, err_msg=str(lengths))
    assert sorted({rows for rows, _ in setup.runner.buckets}) == [1, 2, 4]


def test_a_bucket_is_captured_once(device):
    setup = Setup(device, KINDS["full"])
    ids = device.ops.from_host(np.zeros(3, np.int32))
    for length in range(10, 16):
        setup.runner.replay(ids, meta([length] * 3, setup.slots))
    assert setup.steps == 2  # as it is, and captured
    assert setup.runner.buckets == ((4, 0),)


def test_the_cap_lets_the_step_go_that_was_unused_for_longest(device, monkeypatch):
    from torch_npu import _graph

    from cardan_npu import graph

    monkeypatch.setattr(graph, "MOST_GRAPHS", 2)
    setup = Setup(device, KINDS["full"])
    gc.collect()  # graphs of other tests
    before = _graph.captured_graphs()
    for lengths in ([5], [5, 6], [7], [5, 6, 7]):
        setup.both(lengths)
    assert setup.runner.buckets == ((1, 0), (4, 0))
    assert _graph.captured_graphs() - before == 2
    setup.runner.close()
    assert _graph.captured_graphs() == before


def test_steps_beyond_the_largest_bucket_run_eagerly_and_that_is_said_once(device, caplog):
    setup = Setup(device, KINDS["full"])
    assert device.graph_rows == 4
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not setup.runner.can_replay(meta([9] * 5, setup.slots))
    assert [record.message for record in caplog.records] == [
        "a decode step of 5 rows runs eagerly: steps are captured up to 4 rows. "
        "Raise --platform-option graph_max_rows, or lower --max-running-requests."
    ]
    assert setup.runner.can_replay(meta([9] * 4, setup.slots))


def shared(device, kind: str, pages: int) -> Setup:
    """All rows name the same pages, as with one prefix for all, over a cache of ``pages`` with the padding page."""
    setup = Setup(device, KINDS[kind])
    setup.slots[:] = np.arange(LENGTH) + PAGE
    for row in range(ROWS):
        setup.pool.update_tables([TableDelta(row_id=row, start=0, slots=setup.slots[row][None].astype(np.int32))])
    setup.pool.num_slots = pages * PAGE
    for leaves in (setup.pool.keys, setup.pool.values):
        leaves[:] = [leaf[: pages * PAGE].clone() for leaf in leaves]
    return setup


@pytest.mark.parametrize("kind", ["full", "window", "both"])
def test_rows_that_share_more_pages_than_the_cache_has_take_several_calls(device, kind):
    """Held to each row by itself."""
    setup = shared(device, kind, 6)
    whole = meta([400, 500, 3, 512, 129], setup.slots)
    ids = device.ops.from_host(np.arange(5, dtype=np.int32) + 3)
    plan = setup.backend.plan(whole)
    got = device.ops.to_host(setup.step(ids, device.ops.from_host(whole.positions), plan))
    if kind != "window":
        assert [(part.start, part.stop) for part in plan.rows((0, None)).parts] == [(0, 1), (1, 3), (3, 5)]
    again = setup.step(ids, device.ops.from_host(whole.positions), setup.backend.plan(whole))
    np.testing.assert_array_equal(device.ops.to_host(again), got)
    for row, length in enumerate((400, 500, 3, 512, 129)):
        one = replace(
            meta([length], setup.slots), row_ids=np.array([row], np.int32), positions=whole.positions[row : row + 1]
        )
        alone = setup.step(ids[row : row + 1], device.ops.from_host(one.positions), setup.backend.plan(one))
        np.testing.assert_allclose(device.ops.to_host(alone)[0], got[row], atol=4e-3, rtol=4e-3)


def prompts(counts: list[int], lengths: list[int], slots: np.ndarray, first: int = 0) -> AttentionMeta:
    """A step of several queries a row, for rows from ``first`` on."""
    rows = np.arange(first, first + len(counts), dtype=np.int32)
    ends = np.array(lengths, np.int32)
    at = np.concatenate([np.arange(end - count, end) for count, end in zip(counts, lengths, strict=True)])
    return AttentionMeta(
        mode=ForwardMode.EXTEND,
        query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        seq_lens=ends,
        row_ids=rows,
        positions=at.astype(np.int32),
        out_slots=slots[np.repeat(rows, counts), at][None].astype(np.int32),
    )


def test_a_dry_run_over_the_padding_page_alone_is_taken(device):
    """Every token is in slot 0, as where the largest step is measured."""
    setup = shared(device, "both", 1)
    setup.slots[:] = 0
    setup.pool.host_tables[:] = 0
    step = prompts([300, 129], [300, 129], setup.slots)
    ids = device.ops.from_host(np.arange(429, dtype=np.int32) % 64)
    plan = setup.backend.plan(step)
    out = setup.step(ids, device.ops.from_host(step.positions), plan)
    assert np.isfinite(device.ops.to_host(out)).all()
    assert plan.rows((0, None)).parts == (slice(0, 2),), "one call, as over a pool that has the pages"


@pytest.mark.parametrize("kind", ["full", "both"])
def test_prompts_that_share_more_pages_than_the_cache_has_take_several_calls(device, kind):
    setup = shared(device, kind, 6)
    counts, lengths = [3, 1, 128, 5], [127, 400, 128, 385]
    whole = prompts(counts, lengths, setup.slots)
    ids = device.ops.from_host(np.arange(sum(counts), dtype=np.int32) % 64)
    plan = setup.backend.plan(whole)
    got = device.ops.to_host(setup.step(ids, device.ops.from_host(whole.positions), plan))
    assert [(part.start, part.stop) for part in plan.rows((0, None)).parts] == [(0, 3), (3, 4)]
    got = device.ops.to_host(setup.step(ids, device.ops.from_host(whole.positions), setup.backend.plan(whole)))
    for row, (start, stop) in enumerate(pairwise(whole.query_starts)):
        one = prompts(counts[row : row + 1], lengths[row : row + 1], setup.slots, row)
        alone = setup.step(ids[start:stop], device.ops.from_host(one.positions), setup.backend.plan(one))
        np.testing.assert_allclose(device.ops.to_host(alone), got[start:stop], atol=4e-3, rtol=4e-3)


def test_rows_of_a_call_are_bounded(torch_npu):
    from cardan_npu.attention_plan import rows_by_call

    many = rows_by_call([1] * 9000, PAGE, 10_000)
    assert [(part.start, part.stop) for part in many] == [(0, 4096), (4096, 8192), (8192, 9000)]
    assert rows_by_call([129, 128, 1], PAGE, 4) == (slice(0, 3),)
    assert rows_by_call([129, 128, 1], PAGE, 3) == (slice(0, 2), slice(2, 3))
    assert rows_by_call([300, 300], PAGE, 1) == (slice(0, 1), slice(1, 2))


def test_steps_of_more_pages_than_the_cache_has_are_not_replayed(device, caplog):
    setup = shared(device, "both", 6)
    assert setup.runner.can_replay(meta([128, 256, 129], setup.slots))  # 1 + 2 + 2, and one for the row that fills up
    assert not setup.runner.can_replay(meta([128, 256, 257], setup.slots))
    assert not setup.runner.can_replay(meta([512, 512], setup.slots))
    (said,) = [record.message for record in caplog.records if "runs eagerly" in record.message]
    assert said.startswith("a decode step of 3 rows runs eagerly: with the pages that they share")
    assert "Lower --max-running-requests" in said
    assert shared(device, "torch", 6).runner.can_replay(meta([512, 512], setup.slots))


def test_the_ladder_of_buckets():
    pytest.importorskip("torch")
    from cardan_npu.memory import NPU_MEMORY

    assert [tier.top_bucket for tier in NPU_MEMORY.tiers] == [16, 16, 64]


def test_rungs(torch_npu):
    from cardan_npu.graph import bucket_ladder

    assert bucket_ladder(0) == ()
    assert bucket_ladder(4) == (1, 2, 4)
    assert bucket_ladder(24) == (1, 2, 4, 8, 16, 24)
    assert len(bucket_ladder(256)) < 48
