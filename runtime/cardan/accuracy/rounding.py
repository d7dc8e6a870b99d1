"""What rounding alone may move: every result of a model's operations is pushed by as much as its type rounds.

It knows no platform. What comes of it is the least difference that two correct platforms of one type can have.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cardan.accuracy.watching import Call
from cardan.ops.rounding import ROUNDOFF

PUSHED = ("embed", "linear", "linear_add", "linear_float32", "rms_norm", "layer_norm", "silu_mul", "gelu_mul", "attend")


class Pusher:
    """A listener that moves each result by up to one roundoff of its own size, and one of float32 of its row's.

    Sums of many terms are computed in float32 and rounded in proportion to the terms, not to the sum; the row's size
    stands for them.
    """

    def __init__(self, dtype: str, seed: int) -> None:
        """Bind it.

        Args:
            dtype: of the activations.
            seed: of the pushes.
        """
        self._dtype = dtype
        self._rng = np.random.default_rng(seed)

    def __call__(self, call: Call) -> Any:
        """The result that the model goes on with."""
        if call.op == "add_rms_norm":
            normed, stream = call.result
            return self._push(call, normed, self._dtype), self._push(call, stream, self._dtype)
        if call.op not in PUSHED:
            return None
        return self._push(call, call.result, "float32" if call.op == "linear_float32" else self._dtype)

    def _push(self, call: Call, result: Any, dtype: str) -> Any:
        values = np.asarray(call.ops.to_host(result), np.float32)
        size = np.sqrt(np.mean(values.astype(np.float64) ** 2, axis=-1, keepdims=True))
        allowed = np.abs(values) * ROUNDOFF[dtype] + size * ROUNDOFF["float32"]
        pushes = self._rng.uniform(-1.0, 1.0, values.shape) * allowed
        return call.ops.from_host((values + pushes).astype(np.float32), dtype)
