"""What can be tuned of the Beacon B1: how much of the head is multiplied at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cardan import platform as seam

Array = np.ndarray[Any, Any]
HEAD_ROWS = seam.Tunable(
    name="head_rows", default=4096, least=64, most=65536, help="rows of the head that are multiplied at a time"
)


def multiply(x: Array, head: Array, rows: int) -> Array:
    """``x @ head.T``, some rows of the head at a time."""
    return np.concatenate([x @ head[first : first + rows].T for first in range(0, len(head), rows)], axis=-1)


class BeaconTuner(seam.Tuner):
    """Times the head of a model in pieces of several sizes."""

    processor = "Beacon B1"
    kernels = "beacon-cardan 1.0.0"

    def tunables(self) -> tuple[seam.Tunable, ...]:
        return (HEAD_ROWS,)

    def measure(self, linears: Sequence[seam.TunedLinear], progress: seam.TuningProgress) -> Mapping[str, int]:
        shape = max(((it.spec.out_features, it.spec.in_features) for it in linears), default=(16384, 64))
        x, head = np.ones((4, shape[1]), np.float32), np.ones(shape, np.float32)
        took = {}
        for done, rows in enumerate(sizes := (256, 1024, 4096, 16384)):
            progress("measuring", done, len(sizes))
            multiply(x, head, rows)  # the first call of a size is slower
            took[rows] = min(self._time(x, head, rows) for _ in range(5))
        return {HEAD_ROWS.name: min(took, key=took.__getitem__)}

    @staticmethod
    def _time(x: Array, head: Array, rows: int) -> float:
        start = time.perf_counter()
        multiply(x, head, rows)
        return time.perf_counter() - start
