"""The open Acme A1: memory, weights, KV pool and attention, each in plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from acme_cardan.ops import AcmeOps
from cardan import platform as seam
from cardan.types import KVLayout, LayerKV, TableDelta, TableDeltas, TensorView

Array = np.ndarray[Any, Any]
Q8_BLOCK = np.dtype([("scale", "<f2"), ("values", "i1", 32)])


class Weight(seam.PackedWeight):
    """Rows that are widened to float32 as they are used: dense ones, or blocks of Q8_0."""

    def __init__(self, rows: Array, bias: Array | None) -> None:
        self.rows, self.bias = rows, bias

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def gather(self, ids: Array) -> Array:
        return _widen(self.rows[ids])

    def apply(self, x: Array) -> Array:
        out = x @ _widen(self.rows).T
        return out if self.bias is None else out + self.bias


def _widen(rows: Array) -> Array:
    if rows.dtype != Q8_BLOCK:
        return rows
    return (rows["values"] * rows["scale"].astype(np.float32)[..., None]).reshape(len(rows), -1)


def _read(view: TensorView) -> Array:
    if view.dtype == "Q8_0":
        return np.frombuffer(view.data, Q8_BLOCK).reshape(view.shape[0], -1)
    if view.dtype == "BF16":
        return (np.frombuffer(view.data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(view.shape)
    return np.frombuffer(view.data, "<f2" if view.dtype == "F16" else "<f4").astype(np.float32).reshape(view.shape)


class AcmeLinear(seam.LinearMethod):
    """Dense weights in float32, and Q8_0 as it is."""

    name = "acme"

    def claims(self, fmt: str, spec: seam.LinearSpec) -> str | None:
        return None if fmt in ("F32", "F16", "BF16", "Q8_0") else f"the A1 multiplies float32 and Q8_0, not {fmt}"

    def pack(self, views: Sequence[TensorView], spec: seam.LinearSpec, bias: Array | None) -> seam.PackedWeight:
        return Weight(np.concatenate([_read(view) for view in views]), bias)


class AcmePool(seam.OpsKVPool):
    """``[slots, heads, dim]`` for keys and for values of each layer; tables ``[groups, rows, length]``."""

    def __init__(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> None:
        shapes = [(num_slots, kv.kv_heads, dim) for kv in layout.layers for dim in (kv.k_dim, kv.v_dim)]
        self.arrays = [np.zeros(shape, np.float32) for shape in shapes]
        self.tables = np.zeros((layout.num_groups, num_rows, max_length), np.int32)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def leaves(self) -> tuple[Array, ...]:
        return tuple(self.arrays)

    def bind(self, leaves: Sequence[Array]) -> None:
        self.arrays = list(leaves)

    def update_tables(self, deltas: Sequence[TableDelta]) -> None:
        flat = TableDeltas.of(deltas)
        self.tables[:, flat.rows, flat.positions] = flat.slots


class AcmeAttention(seam.AttentionBackend):
    """Attends row by row over the slots that the row's table names, so that no other slot is ever read."""

    name = "acme"

    def __init__(self, pool: AcmePool) -> None:
        self.pool = pool

    def plan(self, meta: seam.AttentionMeta) -> seam.AttentionMeta:
        return meta

    def forward(
        self, q: Array, k: Array, v: Array, layer: LayerKV, plan: seam.AttentionMeta, sinks: Array | None = None
    ) -> Array:
        keys, values = self.pool.arrays[2 * layer.index : 2 * layer.index + 2]
        keys[plan.out_slots[layer.group]], values[plan.out_slots[layer.group]] = k, v
        out = np.empty((len(q), layer.q_heads * layer.v_dim), np.float32)
        for row, length in enumerate(plan.seq_lens):
            mine = slice(plan.query_starts[row], plan.query_starts[row + 1])
            slots = self.pool.tables[layer.group, plan.row_ids[row], :length]
            back = plan.positions[mine, None] - np.arange(length)
            out[mine] = attend(q[mine], keys[slots], values[slots], layer, back, sinks)
        return out


def attend(q: Array, keys: Array, values: Array, layer: LayerKV, back: Array, sinks: Array | None) -> Array:
    """One row: ``q: [n, q_heads, k_dim]`` over ``keys: [m, kv_heads, k_dim]``, ``back: [n, m]`` positions ago."""
    grouped = q.reshape(len(q), layer.kv_heads, layer.q_heads // layer.kv_heads, -1).transpose(1, 2, 0, 3)
    scores = grouped @ keys.transpose(1, 2, 0)[:, None] * np.float32(layer.scale)
    if layer.softcap is not None:
        scores = np.float32(layer.softcap) * np.tanh(scores / np.float32(layer.softcap))
    seen = (back >= 0) & (back < (layer.window or back.shape[1] + 1))
    scores = np.where(seen, scores, np.float32(-np.inf))
    sink = np.full((*scores.shape[:2], 1, 1), -np.inf) if sinks is None else sinks.reshape(*scores.shape[:2], 1, 1)
    top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    weights = np.exp(scores - top)
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    return (weights @ values.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3).reshape(len(q), -1)


class AcmeFetch:
    """Arrays that are on the host already."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.arrays = tuple(array.copy() for array in arrays)

    def wait(self) -> tuple[Array, ...]:
        return self.arrays


class AcmeDevice(seam.OpsDevice):
    """What the neutral runner asks of the A1, whose memory is the host's."""

    info = seam.DeviceInfo(index=0, name="Acme A1")
    ops = AcmeOps()

    def __init__(self, info: seam.DeviceInfo) -> None:
        self.info = info

    def memory(self) -> seam.Memory:
        return seam.host_memory()

    def memory_policy(self) -> seam.MemoryPolicy:
        return seam.SharedMemoryPolicy()

    def linear_methods(self) -> tuple[seam.LinearMethod, ...]:
        return (AcmeLinear(),)

    def allocate_kv(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> seam.OpsKVPool:
        return AcmePool(layout, num_slots, num_rows, max_length)

    def attention(self, name: str, pool: AcmePool, layout: KVLayout, dtype: str) -> seam.AttentionBackend:
        return AcmeAttention(pool)

    def fetch(self, arrays: Sequence[Array]) -> AcmeFetch:
        return AcmeFetch(arrays)

    def close(self) -> None:
        """Nothing is held."""
