"""Times every call of a device's ops and attention, each without the calls that it makes itself.

It knows no platform: it stands around what ``Platform.open`` gives, and waits for each result, so that work which a
device puts off is counted where it belongs. Times are then those of ops one by one, which overlap on some devices.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from cardan.ops.table import Ops
from cardan.platform import AttentionBackend, DeviceInfo, OpsDevice, PackedWeight, Platform

_HOST = ("from_host", "to_host")
"""Ops that the host waits for in any case."""


@dataclass(slots=True)
class OpTime:
    """Calls of one op.

    Attributes:
        calls: how many.
        seconds: in them, without ops that they call.
        weight_bytes: of packed weights that were multiplied with.
        flops: of these products.
    """

    calls: int = 0
    seconds: float = 0.0
    weight_bytes: int = 0
    flops: int = 0


@dataclass(slots=True)
class OpClock:
    """Times by name of an op; nothing is noted before ``on`` is set.

    Attributes:
        on: whether calls are noted.
        times: by name.
    """

    on: bool = False
    times: dict[str, OpTime] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=list)

    def clear(self) -> None:
        """Forget all times."""
        self.times = {}

    @property
    def total_s(self) -> float:
        """Seconds in all ops."""
        return sum(one.seconds for one in self.times.values())

    def timed(self, name: str, call: Callable[..., Any], settle: Callable[[Any], None]) -> Callable[..., Any]:
        """``call`` with its time noted; ``settle`` waits for a result."""

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return call(*args, **kwargs)
            self._inner.append(0.0)
            start_s = time.perf_counter()
            result = call(*args, **kwargs)
            settle(result)
            taken_s = time.perf_counter() - start_s
            inner_s = self._inner.pop()
            if self._inner:
                self._inner[-1] += taken_s
            one = self.times.setdefault(name, OpTime())
            one.calls += 1
            one.seconds += taken_s - inner_s
            # An embedding gathers a few rows of its weight, so only products count all of it.
            if name.startswith("linear"):
                one.weight_bytes += sum(arg.num_bytes for arg in args if isinstance(arg, PackedWeight))
                one.flops += 2 * math.prod(args[0].shape) * int(result.shape[-1])
            return result

        return run


class TimedPlatform:
    """A platform whose devices note the time of every op; everything else is the platform's own."""

    def __init__(self, platform: Platform, clock: OpClock) -> None:
        self._platform = platform
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def configured(self, options: Mapping[str, Any]) -> Platform:
        """See ``Platform.configured``."""
        return timed_platform(self._platform.configured(options), self._clock)

    def open(self, device: DeviceInfo, options: Mapping[str, Any]) -> Any:
        """Open a device; one that runs whole models itself shows no ops."""
        opened = self._platform.open(device, options)
        if isinstance(opened, OpsDevice):
            _time_device(opened, self._clock)
        return opened


def timed_platform(platform: Platform, clock: OpClock) -> Platform:
    """A platform around ``platform`` whose devices tell ``clock`` the time of every op."""
    return cast(Platform, TimedPlatform(platform, clock))


def _time_device(device: OpsDevice, clock: OpClock) -> None:
    """Put timed calls in the place of a device's own; whoever calls them later gets these."""
    settle = _settler(device)
    ops: Any = device.ops
    for name in _op_names():
        setattr(ops, name, clock.timed(name, getattr(ops, name), _at_once if name in _HOST else settle))
    attention = device.attention

    def timed_attention(*args: Any, **kwargs: Any) -> AttentionBackend:
        backend: Any = attention(*args, **kwargs)
        backend.forward = clock.timed("attention", backend.forward, settle)
        backend.plan = clock.timed("attention plan", backend.plan, _at_once)
        return cast(AttentionBackend, backend)

    patched: Any = device
    patched.attention = timed_attention


def _settler(device: OpsDevice) -> Callable[[Any], None]:
    """Waits for results; a device without ``submit`` of its own has computed when a call returns."""
    if type(device).submit is OpsDevice.submit:
        return _at_once
    one, add = device.ops.from_host(np.zeros(1, np.float32)), device.ops.add

    def settle(result: Any) -> None:
        # What is put off is computed in order, so that a sum that is asked for last comes last.
        last = add(one, one)
        device.submit((*(result if isinstance(result, tuple) else (result,)), last))
        device.fetch((last,)).wait()

    return settle


def _at_once(result: Any) -> None:
    """Nothing to wait for."""


def _op_names() -> list[str]:
    """Every op of the table."""
    return [name for name, _ in inspect.getmembers(Ops, inspect.isfunction) if not name.startswith("_")]
