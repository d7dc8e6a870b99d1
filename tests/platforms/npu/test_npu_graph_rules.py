"""Graphs of the simulated NPU by the documented rules: fixed addresses, no waiting, lengths updated before replays."""

from __future__ import annotations

import gc

import numpy as np
import pytest


@pytest.fixture(scope="module")
def torch(torch_npu):
    import torch

    return torch


def on(torch, array):
    return torch.from_numpy(np.asarray(array)).to("npu")


def capture(torch, run, **how):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **how):
        out = run()
    return graph, out


def test_results_have_no_values_before_a_replay_and_follow_copies_after_it(torch):
    x = on(torch, np.ones(3, np.float32))
    graph, y = capture(torch, lambda: x * 2 + 1)
    assert y.cpu().isnan().all()
    for value in (1.0, 5.0):
        x.copy_(torch.full((3,), value))
        graph.replay()
        assert y.cpu().tolist() == [2 * value + 1] * 3


def test_capturing_changes_nothing_that_was_there(torch):
    x = on(torch, np.zeros(2, np.float32))
    graph, _ = capture(torch, lambda: x.add_(1))
    assert x.cpu().tolist() == [0, 0]
    graph.replay()
    graph.replay()
    assert x.cpu().tolist() == [2, 2]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda torch, x: x.sum().item(), "cannot wait"),
        (lambda torch, x: bool((x > 0).any()), "cannot wait"),
        (lambda torch, x: x.nonzero(), "shape of the result"),
        (lambda torch, x: x[x > 0], "truth values"),
        (lambda torch, x: x.cpu(), "memory of the host"),
        (lambda torch, x: x.copy_(torch.ones(3)), "memory of the host"),
        (lambda torch, x: torch.npu.synchronize(), "cannot wait"),
    ],
    ids=["item", "truth", "nonzero", "index-by-mask", "to-host", "from-host", "synchronize"],
)
def test_what_the_host_waits_for_is_refused_while_capturing(torch, run, said):
    x = on(torch, np.ones(3, np.float32))
    with pytest.raises(RuntimeError, match=said):
        capture(torch, lambda: run(torch, x))
    graph, y = capture(torch, lambda: x + 1)  # the failed capture is over
    graph.replay()
    assert y.cpu().tolist() == [2, 2, 2]


def test_memory_that_was_given_back_is_not_replayed_over(torch):
    held = [on(torch, np.ones(3, np.float32))]
    graph, _ = capture(torch, lambda: held[0] + 1)
    held.clear()
    with pytest.raises(RuntimeError, match="given back"):
        graph.replay()


def test_a_graph_is_captured_once_and_before_it_is_replayed(torch):
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="not captured"):
        graph.replay()
    with torch.npu.graph(graph):
        pass
    with pytest.raises(RuntimeError, match="captured before"), torch.npu.graph(graph):
        pass


def test_streams_are_not_endless(torch, monkeypatch):
    from torch_npu import _graph

    gc.collect()  # graphs of other tests
    monkeypatch.setattr(_graph, "MOST_STREAMS", _graph.captured_graphs() + 1)
    held, _ = capture(torch, lambda: None)
    with pytest.raises(RuntimeError, match="streams"):
        capture(torch, lambda: None)
    held.reset()
    capture(torch, lambda: None)


@pytest.fixture
def attending(torch, torch_npu):
    """A captured attention over one row of 3 keys, whose value at key ``i`` is ``i``."""
    query = on(torch, np.zeros((1, 1, 16), np.float16))
    keys = on(torch, np.zeros((2, 128, 16), np.float16))
    values = on(torch, np.broadcast_to(np.arange(256, dtype=np.float16).reshape(2, 128, 1), (2, 128, 16)).copy())
    table = on(torch, np.array([[0, 1]], np.int32))

    def run():
        return torch_npu.npu_fused_infer_attention_score(
            query, keys, values, actual_seq_lengths=[1], actual_seq_lengths_kv=[3], block_table=table, num_heads=1,
            num_key_value_heads=1, input_layout="TND", block_size=128,
        )[0]  # fmt: skip

    graph, out = capture(torch, run, auto_dispatch_capture=True)
    return graph, out, (query, keys, values, table)


def test_lengths_are_updated_before_every_replay(attending):
    graph, out, _ = attending
    with pytest.raises(RuntimeError, match="update"):
        graph.replay()
    for length in (3, 5, 201):
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [length]}])
        graph.replay()
        assert abs(float(out.cpu()[0, 0, 0]) - (length - 1) / 2) < 0.1
    with pytest.raises(RuntimeError, match="update"):
        graph.replay()


def test_updates_name_known_arguments_once_for_each_operator(attending):
    graph, _, _ = attending
    with pytest.raises(RuntimeError, match="must have 1 or 1 entries"):
        graph.update(cpu_update_input=[{}, {}])
    with pytest.raises(RuntimeError, match="from the host"):
        graph.update(cpu_update_input=[{"scale": 2.0}])
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [900]}])
    with pytest.raises(RuntimeError, match="columns"):
        graph.replay()


def test_updates_need_a_capture_that_keeps_them(torch):
    graph, _ = capture(torch, lambda: None)
    with pytest.raises(RuntimeError, match="auto_dispatch_capture"):
        graph.update(cpu_update_input=[{}])
