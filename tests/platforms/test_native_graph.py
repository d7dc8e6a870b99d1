"""Recorded decode steps on the native kernels: replay gives what eager steps give, whatever rows come and go."""

from __future__ import annotations

import pytest

pytest.importorskip("cardan_native")

from field_requests import PARAMS, assert_same, run, start

from cardan.testing import write_tiny_model
from cardan_cpu import native_graph
from cardan_cpu.native_graph import NativeGraphRunner, fill_up


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("native") / "tiny", context_length=512)


def recorded(prepared) -> NativeGraphRunner:
    runner = prepared.runner._graph
    assert isinstance(runner, NativeGraphRunner)
    return runner


def test_replayed_steps_give_the_tokens_of_eager_ones(tiny_model):
    core, prepared = start(tiny_model, "cpu")
    assert prepared.plan.value("graph") is True
    before = set(recorded(prepared).recorded_rows)
    assert before == {1, prepared.settings.max_running_requests}
    replayed = run(core, tuple(PARAMS))
    assert core.stats().totals["graph_replays"] > 0
    assert before < set(recorded(prepared).recorded_rows)
    prepared.close()
    core, prepared = start(tiny_model, "cpu")
    prepared.runner._graph = None
    eager = run(core, tuple(PARAMS))
    assert core.stats().totals["graph_replays"] == 0
    prepared.close()
    assert_same(eager, replayed)


def test_few_steps_are_kept(tiny_model, monkeypatch):
    monkeypatch.setattr(native_graph, "MOST_GRAPHS", 2)
    core, prepared = start(tiny_model, "cpu")
    run(core, tuple(PARAMS))
    assert len(recorded(prepared).recorded_rows) == 2
    assert 0 < recorded(prepared).num_bytes < 2**20
    prepared.close()


@pytest.mark.parametrize(("rows", "filled"), [(1, 1), (16, 16), (17, 24), (24, 24), (25, 32), (64, 64)])
def test_rows_are_filled_up(rows, filled):
    assert fill_up(rows) == filled
