"""The MLX device: ops, pool, attention, linears, memory, and when lazy work is computed.

It knows no model.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from cardan.errors import UnsupportedError
from cardan.platform import (
    AttentionBackend,
    DeviceInfo,
    GraphRunner,
    LinearMethod,
    Memory,
    MemoryPolicy,
    OpsDevice,
    OpsKVPool,
    host_memory,
)
from cardan.platform.ops_device import CapturedStep
from cardan.types import KVLayout
from cardan_mlx.affine import AffineLinear
from cardan_mlx.arrays import start
from cardan_mlx.attention import MlxAttention
from cardan_mlx.graph import MlxGraphRunner
from cardan_mlx.kv_pool import MlxKVPool
from cardan_mlx.linear import DenseLinear
from cardan_mlx.memory import MlxMemoryPolicy, cache_limit, device_memory, has_metal, working_set
from cardan_mlx.metal_decode import MetalDecode
from cardan_mlx.ops import MlxOps, to_numpy

GATHER = "gather"
METAL = "metal"

FETCHES_AHEAD = 2
"""Fetches of one call that may be under way: a third waits for the first, which bounds blocks of prompt logprobs."""


class MlxFetch:
    """Arrays that are being computed."""

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        self._arrays = tuple(arrays)
        start(*self._arrays)

    def wait(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Block until they are there."""
        return tuple(to_numpy(x) for x in self._arrays)

    def settle(self) -> None:
        """Block until they are there, without copying them."""
        mx.eval(*self._arrays)


class MlxDevice(OpsDevice):
    """The GPU through Metal, or the cores of a Linux machine."""

    def __init__(self, info: DeviceInfo, cache_limit_mib: int = 0) -> None:
        """Open the device.

        Args:
            info: which device.
            cache_limit_mib: freed buffers that MLX may keep; 0 chooses by the size of the memory.
        """
        self._info = info
        self._metal = has_metal()
        self._ops = MlxOps(has_float64=not self._metal)
        self._linears: tuple[LinearMethod, ...] = (AffineLinear(sums_in_float32=self._metal), DenseLinear())
        self._pools: weakref.WeakSet[MlxKVPool] = weakref.WeakSet()
        self._fetches: deque[MlxFetch] = deque()
        self._kept = cache_limit_mib * 2**20 or cache_limit(self.memory().total)
        mx.set_cache_limit(self._kept)

    @property
    def info(self) -> DeviceInfo:
        """Which device this is."""
        return self._info

    @property
    def ops(self) -> MlxOps:
        """The ops table."""
        return self._ops

    def scope(self) -> AbstractContextManager[Any]:
        """Counts the fetches of one call of the runner."""
        return self._counted()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._fetches.clear()
        yield

    def memory(self) -> Memory:
        """The working set that the GPU should keep to, or the host's memory."""
        return device_memory(host_memory(), working_set(), int(mx.get_active_memory()))

    def memory_policy(self) -> MemoryPolicy:
        """A share of what is free, since others use the memory too."""
        return MlxMemoryPolicy(self._kept)

    def linear_methods(self) -> tuple[LinearMethod, ...]:
        """Quantized weights as MLX multiplies them, then dense ones."""
        return self._linears

    def allocate_kv(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> OpsKVPool:
        """Zeroed arrays per layer."""
        pool = MlxKVPool(layout, num_slots, num_rows, max_length, self.settle)
        self._pools.add(pool)
        return pool

    def attention(self, name: str, pool: OpsKVPool, layout: KVLayout, dtype: str) -> AttentionBackend:
        """The backend ``gather``, or ``metal`` where there is a GPU.

        Raises:
            UnsupportedError: another name, or no GPU.
            TypeError: the pool is another device's.
        """
        if not isinstance(pool, MlxKVPool):
            raise TypeError(f"the pool must come from this device's allocate_kv, got {type(pool).__name__}")
        names = (GATHER, METAL) if self._metal else (GATHER,)
        if name not in names:
            raise UnsupportedError(
                f"Attention backend must be one of {', '.join(names)} on {self.info.name}, got {name!r}. "
                f"Pass --attention-backend {GATHER}."
            )
        return MlxAttention(pool, name, MetalDecode() if name == METAL else None)

    def graph_runner(self, pool: OpsKVPool, backend: AttentionBackend, step: CapturedStep) -> GraphRunner | None:
        """``mx.compile`` over decode steps."""
        if not isinstance(pool, MlxKVPool) or not isinstance(backend, MlxAttention):
            return None
        return MlxGraphRunner(pool, backend, step)

    def activation_peak(self, run: Callable[[], None]) -> int | None:
        """The peak that MLX counts; not measured on Linux, where the dry step would take minutes."""
        return self.measured_peak(run) if self._metal else None

    def measured_peak(self, run: Callable[[], None]) -> int:
        """Bytes that ``run`` takes at most, beyond what is held before it."""
        self.settle()
        before = int(mx.get_active_memory())
        mx.reset_peak_memory()
        run()
        self.settle()
        peak = int(mx.get_peak_memory()) - before
        mx.clear_cache()
        return max(peak, 0)

    def submit(self, arrays: Sequence[mx.array]) -> None:
        """Start computing ``arrays`` and what was written to the pools, and return."""
        leaves = [leaf for pool in self._pools for leaf in pool.leaves()]
        start(*arrays, *leaves)

    def fetch(self, arrays: Sequence[mx.array]) -> MlxFetch:
        """Start computing ``arrays``."""
        if len(self._fetches) == FETCHES_AHEAD:
            self._fetches.popleft().settle()
        fetch = MlxFetch(arrays)
        self._fetches.append(fetch)
        return fetch

    def settle(self) -> None:
        """Wait for everything that was submitted."""
        mx.synchronize()

    def close(self) -> None:
        """Give MLX's kept buffers back; arrays go with their last reference."""
        self.settle()
        self._fetches.clear()
        mx.clear_cache()
