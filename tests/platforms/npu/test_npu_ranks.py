"""Ranks of NPUs: two processes on the simulator add up and join what they have over HCCL; misuses are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import run_ranks

SIMULATORS = Path(__file__).parents[2] / "simulators"

RANK = """
    import numpy as np
    import torch
    import torch_npu
    from torch import distributed
    from cardan.errors import ConfigError
    from cardan.platform import RankPlace
    from cardan_npu import platform

    device = platform.open(platform.devices()[0], {})
    place = RankPlace(rank=rank, size=2, address=address)
    group = device.communicator(place)
    assert group.place is place
    assert distributed.get_backend() == "hccl"
    ops = device.ops
    with device.scope():
        for dtype in ("float32", "bfloat16", "float16"):
            x = ops.from_host(np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * rank, dtype)
            joined = ops.to_host(ops.all_gather(x))
            assert joined.tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]], joined
            summed = ops.to_host(ops.all_reduce(x))
            assert summed.tolist() == [[10, 12, 14], [16, 18, 20]], summed

    def refused(run, said):
        try:
            run()
        except (RuntimeError, ConfigError) as error:
            assert said in str(error), error
        else:
            raise AssertionError(said)

    refused(lambda: distributed.all_reduce(torch.ones(2)), "Tensors must be NPU and dense")
    truths = torch.ones(2, dtype=torch.bool).to("npu")
    refused(lambda: distributed.all_reduce(truths), "the tensor must be int8")
    across = torch.ones(2, 3).to("npu").t()
    refused(lambda: distributed.all_reduce(across), "must be contiguous")
    ones = torch.ones(2).to("npu")
    refused(lambda: distributed.all_reduce(ones, op=distributed.ReduceOp.MAX), "knows sums")
    refused(lambda: distributed.all_gather([ones], ones), "there must be 2 outputs, got 1")
    graph = torch.npu.NPUGraph()
    graph.capture_begin()
    refused(lambda: distributed.all_reduce(ones), "does not capture collectives")
    graph.abort()
    refused(lambda: device.communicator(place), "a rank of a group already")
    device.close()
    assert not distributed.is_initialized()
"""


def test_two_ranks_add_up_and_join_what_they_have(torch_npu, tmp_path):
    run_ranks(RANK, tmp_path, [SIMULATORS])


def test_ranks_that_fail_or_do_not_end_say_what_they_said(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)rank \d ended with 1:\n.*SyntaxError"):
        run_ranks("no program", tmp_path, [])
    with pytest.raises(AssertionError, match=r"(?s)within 0 s .*\nrank 1 ended with None:\n"):
        run_ranks("input()", tmp_path, [], timeout_s=0)


def test_one_rank_has_nobody_to_wait_for(device):
    x = device.ops.from_host([[1.0, 2.0]], "float32")
    assert device.ops.all_reduce(x) is x
    assert device.ops.all_gather(x) is x


def test_the_group_is_left_where_the_device_failed(torch_npu, monkeypatch):
    from cardan_npu import device as module
    from cardan_npu import platform

    opened, events = platform.open(platform.devices()[0], {}), []
    opened.ops.communicator = SimpleNamespace(close=lambda: events.append("group left"))
    monkeypatch.setattr(module.NPU, "synchronize", lambda device: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        opened.close()
    assert events == ["group left"]
    assert opened.ops.communicator is None
