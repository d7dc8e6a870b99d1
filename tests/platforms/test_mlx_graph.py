"""Captured decode steps on MLX: replay gives what eager steps give, whatever rows come and go."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from field_requests import PARAMS, assert_same, run, start  # noqa: E402

from cardan.platform import AttentionMeta  # noqa: E402
from cardan.testing import write_tiny_model  # noqa: E402
from cardan.types import ForwardMode  # noqa: E402
from cardan_mlx import graph  # noqa: E402
from cardan_mlx.graph import PAGE, MlxGraphRunner, bucket_rows, bucket_width  # noqa: E402


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("mlx") / "tiny", context_length=512)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_replayed_steps_give_the_tokens_of_eager_ones(tiny_model, overlap):
    core, prepared = start(tiny_model, "mlx", overlap=overlap)
    assert prepared.plan.value("graph") is False
    eager = run(core, tuple(PARAMS))
    prepared.close()
    core, prepared = start(tiny_model, "mlx", overlap=overlap)
    prepared.runner.capture_decode()
    replayed = run(core, tuple(PARAMS))
    captured = prepared.runner._graph
    assert isinstance(captured, MlxGraphRunner)
    assert {rows for rows, _ in captured.buckets} >= {1, 2, 8, 16}
    assert {width for _, width in captured.buckets} >= {PAGE, 2 * PAGE}
    prepared.close()
    assert_same(eager, replayed)


def test_few_buckets_are_kept(tiny_model, monkeypatch):
    monkeypatch.setattr(graph, "MOST_BUCKETS", 2)
    core, prepared = start(tiny_model, "mlx")
    prepared.runner.capture_decode()
    run(core, ("greedy", "top-k", "hot"))
    assert len(prepared.runner._graph.buckets) <= 2
    prepared.close()


def test_steps_that_would_gather_too_much_run_eagerly(tiny_model, monkeypatch):
    monkeypatch.setattr(graph, "GATHERED_KEYS", 4 * PAGE)
    _, prepared = start(tiny_model, "mlx")
    prepared.runner.capture_decode()
    runner = prepared.runner._graph

    def meta(rows, length):
        return AttentionMeta(
            mode=ForwardMode.DECODE,
            query_starts=np.arange(rows + 1, dtype=np.int32),
            seq_lens=np.full(rows, length, np.int32),
            row_ids=np.arange(rows, dtype=np.int32),
            positions=np.full(rows, length - 1, np.int32),
            out_slots=np.zeros((1, rows), np.int32),
        )

    assert runner.can_replay(meta(4, PAGE))
    assert runner.can_replay(meta(1, 4 * PAGE))
    assert not runner.can_replay(meta(5, PAGE))
    assert not runner.can_replay(meta(4, PAGE + 1))
    prepared.close()


def test_buckets():
    assert [bucket_rows(n) for n in (1, 2, 3, 5, 9, 16, 17, 33, 64)] == [1, 2, 4, 8, 16, 16, 32, 48, 64]
    assert [bucket_width(n) // PAGE for n in (1, 64, 65, 512, 513, 1025, 1090, 4096, 4097)] == [
        1,
        1,
        2,
        8,
        9,
        18,
        18,
        64,
        72,
    ]
    widths = [bucket_width(n) for n in range(1, 20_000)]
    assert all(n <= width <= 1.25 * n + PAGE for n, width in enumerate(widths, 1))
    assert len(set(widths)) < 60
