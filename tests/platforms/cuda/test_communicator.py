"""Ranks of GPU platforms: two processes on the stand-in add up and join what they have; what cannot be is refused."""

from __future__ import annotations

import textwrap
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from emulated_gpu import emulated  # noqa: E402
from ranks import run_ranks  # noqa: E402

from cardan.errors import ConfigError  # noqa: E402
from cardan.platform import RankPlace  # noqa: E402

RANK = """
    import numpy as np
    import torch
    from emulated_gpu import emulated
    from cardan.errors import ConfigError
    from cardan.platform import RankPlace

    platform = emulated(name)
    device = platform.open(platform.devices()[0], {"device": "emulated"})
    place = RankPlace(rank=rank, size=2, address=address)
    group = device.communicator(place)
    assert group.place is place
    ops = device.ops
    with device.scope():
        for dtype in ("float32", "bfloat16"):
            x = ops.from_host(np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * rank, dtype)
            joined = ops.to_host(ops.all_gather(x))
            assert joined.tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]], joined
            summed = ops.to_host(ops.all_reduce(x))
            assert summed.tolist() == [[10, 12, 14], [16, 18, 20]], summed
    try:
        device.communicator(place)
    except ConfigError as error:
        assert "a rank of a group already. Run each rank in a process of its own." in str(error)
    else:
        raise AssertionError("a second group was joined")
    device.close()
    assert not torch.distributed.is_initialized()
"""


@pytest.mark.parametrize("name", ["cuda", pytest.param("rocm", marks=pytest.mark.slow)])
def test_two_ranks_add_up_and_join_what_they_have(name, tmp_path):
    run_ranks(f"name = {name!r}\n{textwrap.dedent(RANK)}", tmp_path, [Path(__file__).parents[2] / "support"])


def test_one_rank_has_nobody_to_wait_for():
    platform = emulated("cuda")
    device = platform.open(platform.devices()[0], {"device": "emulated"})
    x = torch.ones(2, 3)
    assert device.ops.all_reduce(x) is x
    assert device.ops.all_gather(x) is x


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"rank": 2}, "A rank of 2 must be 0 to 1, got 2. Count the ranks from 0."),
        ({"rank": -1}, "A rank of 2 must be 0 to 1, got -1."),
        ({"address": "127.0.0.1"}, "must be host:port, got '127.0.0.1'. Pass such as 127.0.0.1:29500."),
        ({"address": ":80"}, "must be host:port, got ':80'"),
    ],
)
def test_places_that_cannot_be_are_refused(place, message):
    with pytest.raises(ConfigError) as refused:
        RankPlace(**{"rank": 0, "size": 2, "address": "127.0.0.1:29500", **place})
    assert message in str(refused.value)


def test_a_library_that_torch_was_built_without_is_named(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda library: False)
    platform = emulated("cuda")
    device = platform.open(platform.devices()[0], {"device": "emulated"})
    with pytest.raises(ConfigError, match=r"Ranks on cpu need gloo, and torch was built without it. Run one rank."):
        device.communicator(RankPlace(rank=0, size=1, address="127.0.0.1:29500"))


def opened(monkeypatch, events):
    """A device of one rank whose group and accelerator say when they are left."""
    platform = emulated("cuda")
    device = platform.open(platform.devices()[0], {"device": "emulated"})
    device.ops.communicator = SimpleNamespace(close=lambda: events.append("group left"))
    monkeypatch.setattr(device.accelerator, "close", lambda: events.append("closed"))
    return device


def test_a_device_that_is_closed_twice_leaves_its_group_once(monkeypatch):
    events = []
    device = opened(monkeypatch, events)
    device.close()
    assert device.ops.communicator is None
    device.close()
    assert events == ["group left", "closed", "closed"]


def test_the_group_is_left_where_the_device_failed(monkeypatch):
    events = []
    device = opened(monkeypatch, events)

    def fail():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(device.accelerator, "close", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.close()
    assert events == ["group left"]


def test_the_device_is_closed_where_its_group_failed(monkeypatch):
    events = []
    device = opened(monkeypatch, events)
    device.ops.communicator = SimpleNamespace(close=partial(next, iter(())))
    with pytest.raises(StopIteration):
        device.close()
    assert events == ["closed"]
