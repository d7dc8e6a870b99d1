"""The k largest entries of rows, equal ones by lower index first.

It knows no sampling. MLX's own ``topk`` leaves the order of equal values open, and which of them fall off the end.
"""

from __future__ import annotations

import mlx.core as mx

SIGN = -(2**31)
LOW_HALF = 0xFFFFFFFF


def topk(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Values and int32 indices of the ``k`` largest of each row of ``x: float32 [rows, columns]``.

    Each entry becomes one integer, its ordered bits above its index counted from the end, so that no two are equal
    and any partition or sort gives the one right order.
    """
    if x.size == 0:  # MLX reduces nothing to nothing by an error
        return x[:, :k], mx.zeros((len(x), k), mx.int32)
    if k == 1:
        best = mx.argmax(x, axis=-1, keepdims=True)
        return mx.take_along_axis(x, best, axis=-1), best.astype(mx.int32)
    columns = x.shape[-1]
    from_end = mx.arange(columns - 1, -1, -1, dtype=mx.uint64)
    ranked = (_ordered(x).astype(mx.uint64) << mx.array(32, mx.uint64)) | from_end
    if k < columns:
        ranked = mx.partition(ranked, columns - k, axis=-1)[:, columns - k :]
    ranked = mx.sort(ranked, axis=-1)[:, ::-1]
    places = (ranked & mx.array(LOW_HALF, mx.uint64)).astype(mx.int32)
    ids = columns - 1 - places
    return mx.take_along_axis(x, ids, axis=-1), ids


def _ordered(x: mx.array) -> mx.array:
    """Uint32 in the order of the floats; adding zero makes -0 equal to 0."""
    bits = (x + 0.0).view(mx.int32)
    return mx.where(bits < 0, ~bits, bits | mx.array(SIGN, mx.int32)).view(mx.uint32)
