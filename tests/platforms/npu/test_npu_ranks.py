"""Ranks of NPUs: two processes on the simulator add up and join what they have over HCCL; misuses are refused."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

SIMULATORS = str(Path(__file__).parents[2] / "simulators")

RANK = """
    import sys
    import numpy as np
    import torch
    import torch_npu
    from torch import distributed
    from cardan.errors import ConfigError
    from cardan.platform import RankPlace
    from cardan_npu import platform

    rank, address = int(sys.argv[1]), sys.argv[2]
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


def test_two_ranks_add_up_and_join_what_they_have(torch_npu):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    program = f"import sys; sys.path[:0] = [{SIMULATORS!r}]\n" + textwrap.dedent(RANK)
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(rank), address], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], said


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
