"""``torch.npu``: one simulated device, its memory, streams and events.

Source: the API list of Ascend Extension for PyTorch, ``torch_npu.npu``: the calls are named as those of ``torch.cuda``.
"""

from __future__ import annotations

import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch_npu import _graph, _memory, _tensor
from torch_npu._refusal import refuse, require

NAME = "Ascend910B (simulated)"


class Stream:
    """An order of work; all work of the simulator is done when it is called."""

    def __init__(self, device: Any = None) -> None:
        """A stream of the device."""

    def synchronize(self) -> None:
        """Wait for its work."""
        synchronize()

    def wait_stream(self, stream: Stream) -> None:
        """Wait for what another one has now."""

    def wait_event(self, event: Event) -> None:
        """Wait for an event."""


class Event:
    """A point in the order of work."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        """An event that was not recorded."""
        self._time: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark the point."""
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Wait for the point."""
        synchronize()

    def query(self) -> bool:
        """Whether it was reached."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two points."""
        require(self._time is not None and end._time is not None, "Event.elapsed_time", "both must be recorded")
        assert self._time is not None
        assert end._time is not None
        return 1000 * (end._time - self._time)


_default = Stream()


def synchronize(device: Any = None) -> None:
    """Wait for all work."""
    if _tensor.state.recording is not None:
        refuse("synchronize", "the host cannot wait for a stream that is being captured (107027)")


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """Work inside goes to a stream."""
    yield


def set_device(device: Any) -> None:
    """Choose the device."""
    index = device if isinstance(device, int) else getattr(device, "index", None) or 0
    require(index == 0, "set_device", f"there is one device, 0, got {index} (107001)")


def get_device_properties(device: Any = None) -> types.SimpleNamespace:
    """Name and memory."""
    return types.SimpleNamespace(name=NAME, total_memory=_memory.TOTAL)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    return _memory.TOTAL - _memory.counters.allocated, _memory.TOTAL


def reset_peak_memory_stats(device: Any = None) -> None:
    """Forget the peak."""
    _memory.counters.peak = _memory.counters.allocated


class Module(types.ModuleType):
    """What ``torch.npu`` is."""

    NPUGraph = _graph.NPUGraph
    graph = _graph.graph
    Stream = Stream
    Event = Event
    synchronize = staticmethod(synchronize)
    stream = staticmethod(stream)
    set_device = staticmethod(set_device)
    get_device_properties = staticmethod(get_device_properties)
    mem_get_info = staticmethod(mem_get_info)
    reset_peak_memory_stats = staticmethod(reset_peak_memory_stats)

    @staticmethod
    def is_available() -> bool:
        """Always."""
        return True

    @staticmethod
    def device_count() -> int:
        """One."""
        return 1

    @staticmethod
    def current_device() -> int:
        """The only one."""
        return 0

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        """Its name."""
        return NAME

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        """Bytes of living tensors."""
        return _memory.counters.allocated

    @staticmethod
    def memory_reserved(device: Any = None) -> int:
        """As much as is allocated: the simulator keeps nothing."""
        return _memory.counters.allocated

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        """The peak."""
        return _memory.counters.peak

    @staticmethod
    def empty_cache() -> None:
        """Nothing is kept."""

    @staticmethod
    def current_stream(device: Any = None) -> Stream:
        """The stream of the thread."""
        return _default

    @staticmethod
    def graph_pool_handle() -> tuple[int, int]:
        """A memory pool that graphs can share."""
        return (0, 1)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Nothing here draws."""

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False
