"""Captured decode steps: which row counts, in which order, and what happens beyond the largest."""

from __future__ import annotations

import logging

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cardan.errors import MemoryPlanError  # noqa: E402
from cardan.platform import AttentionMeta  # noqa: E402
from cardan.types import ForwardMode  # noqa: E402
from cardan_torch.gpu.emulation import EmulatedAccelerator  # noqa: E402
from cardan_torch.gpu.graph import GpuGraphRunner, bucket_ladder  # noqa: E402
from cardan_torch.gpu.step_arrays import StepArrays  # noqa: E402


def decode(rows, groups=1):
    count = np.arange(rows, dtype=np.int32)
    return AttentionMeta(
        mode=ForwardMode.DECODE,
        query_starts=np.arange(rows + 1, dtype=np.int32),
        seq_lens=count + 5,
        row_ids=count + 1,
        positions=count + 4,
        out_slots=np.tile(count + 100, (groups, 1)),
    )


def test_the_ladder_is_1_2_4_8_12_then_every_8th_from_16():
    assert bucket_ladder(256) == (1, 2, 4, 8, 12, *range(16, 257, 8))
    assert bucket_ladder(12) == (1, 2, 4, 8, 12)
    assert bucket_ladder(13)[-1] == 16
    assert bucket_ladder(3) == (1, 2, 4)
    assert bucket_ladder(1) == (1,)


class Plans:
    """An attention backend that keeps positions only."""

    def __init__(self, gpu):
        self.gpu = gpu

    def fixed_plan(self, rows):
        return StepArrays(self.gpu, rows, rows, 1)

    def refill(self, plan, meta):
        plan.fill(meta)


@pytest.fixture
def runner():
    gpu = EmulatedAccelerator("sm_90")
    captured = []

    def step(ids, positions, plan):
        captured.append(len(ids))
        return torch.stack((ids, positions, plan.out_slots[0], plan.row_ids), dim=1) * 1.0

    found = GpuGraphRunner(gpu, Plans(gpu), step, bucket_ladder(12))
    found.captured = captured
    return found


def test_all_sizes_are_captured_at_the_first_step_largest_first_and_never_again(runner):
    for rows in (1, 3, 12, 5):
        runner.replay(torch.arange(rows, dtype=torch.int32), decode(rows))
    assert runner.captured == [12, 8, 4, 2, 1]
    assert runner.buckets == (12, 8, 4, 2, 1)


def test_a_step_is_filled_up_with_rows_of_one_token_in_slot_0(runner):
    result = runner.replay(torch.tensor([7, 8, 9], dtype=torch.int32), decode(3))
    assert result.tolist() == [[7, 4, 100, 1], [8, 5, 101, 2], [9, 6, 102, 3]]
    whole = runner._buckets[4].hidden
    assert whole[3, 1:].tolist() == [0, 0, 0]
    arrays = runner._buckets[4].plan
    assert arrays.seq_lens.tolist() == [5, 6, 7, 1]
    assert arrays.query_starts.tolist() == [0, 1, 2, 3, 4]


def test_the_same_array_comes_back_for_a_size_since_recordings_go_by_it(runner):
    first = runner.replay(torch.zeros(3, dtype=torch.int32), decode(3))
    assert runner.replay(torch.ones(3, dtype=torch.int32), decode(3)) is first


def test_beyond_the_largest_size_steps_run_eagerly_and_the_log_says_so_once(runner, caplog):
    with caplog.at_level(logging.WARNING):
        assert not runner.can_replay(decode(13))
        assert not runner.can_replay(decode(14))
        assert runner.can_replay(decode(12))
    assert [record.getMessage() for record in caplog.records] == [
        "a decode step of 13 rows runs eagerly: steps are captured up to 12 rows. Raise --platform-option "
        "cuda_graph_max_bs_decode, or lower --max-running-requests."
    ]
    assert not runner.can_replay(decode(0))


def test_without_memory_for_a_capture_it_is_said_what_to_do_and_the_next_step_captures_anew(runner, monkeypatch):
    step = runner._step

    def short_of_memory(ids, positions, plan):
        if len(ids) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return step(ids, positions, plan)

    ids = torch.tensor([7, 8, 9], dtype=torch.int32)
    monkeypatch.setattr(runner, "_step", short_of_memory)
    for _ in range(2):
        with pytest.raises(MemoryPlanError) as refused:
            runner.replay(ids, decode(3))
        assert str(refused.value) == (
            "No memory is left on the GPU to capture a decode step of 4 rows, with 2 of 5 sizes captured. Pass "
            "--platform-option cuda_graph_max_bs_decode with fewer than 12 rows, a smaller --mem-fraction-static, or "
            "--disable-graph."
        )
        assert runner.buckets == ()
    monkeypatch.setattr(runner, "_step", step)
    assert runner.replay(ids, decode(3))[:, 0].tolist() == [7, 8, 9]


def test_step_arrays_refuse_what_they_cannot_hold():
    arrays = StepArrays(EmulatedAccelerator("sm_90"), 2, 2, 1)
    with pytest.raises(ValueError, match=r"of 2 rows and 2 tokens cannot hold 3 rows of 3 tokens"):
        arrays.fill(decode(3))
