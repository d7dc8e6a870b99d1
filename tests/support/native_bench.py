"""What tests of native attention share: arrays and their bits, a stand-in device, and sequences at scattered slots."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from cardan.types import KVLayout, LayerKV
from cardan_cpu.native_attention import NativeAttention
from cardan_cpu.native_kv_pool import NativeKVPool


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as the kernels take them; bfloat16 rounds to nearest even, NaN stays NaN."""
    if dtype == "float32":
        return np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "float16":
        return np.ascontiguousarray(values, dtype=np.float16).view(np.uint16)
    single = np.ascontiguousarray(values, dtype=np.float32)
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded)


def from_bits(bits: np.ndarray, dtype: str) -> np.ndarray:
    """The values of bits, in float64."""
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float64)
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.astype(np.float64)


def tensor(native: ModuleType, values: np.ndarray, dtype: str = "float32") -> Any:
    """A tensor of these values."""
    if dtype == "int32":
        return native.Tensor.from_bits(np.ascontiguousarray(values, dtype=np.int32), dtype)
    return native.Tensor.from_bits(to_bits(values, dtype), dtype)


def values_of(x: Any) -> np.ndarray:
    """The values of a tensor, in float64."""
    return from_bits(np.array(x.bits()), x.dtype)


@dataclass
class BenchDevice:
    """As much of a device as the bench of the conformance suite asks for."""

    native: ModuleType

    @property
    def ops(self) -> BenchDevice:
        return self

    def scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    def allocate_kv(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> NativeKVPool:
        return NativeKVPool(self.native, layout, num_slots, num_rows, max_length)

    def attention(self, name: str, pool: NativeKVPool, layout: KVLayout, dtype: str) -> NativeAttention:
        return NativeAttention(pool)

    def from_host(self, values: np.ndarray, dtype: str) -> Any:
        return tensor(self.native, values, dtype)

    def to_host(self, x: Any) -> np.ndarray:
        return values_of(x)


def layer_kv(**changes: Any) -> LayerKV:
    """A small layer with grouped heads."""
    sizes: dict[str, Any] = {"index": 0, "q_heads": 6, "kv_heads": 2, "k_dim": 16, "v_dim": 16, "scale": 0.25}
    return LayerKV(**{**sizes, **changes})


@dataclass
class Stage:
    """A pool of one layer with sequences in it; all other slots hold NaN.

    Attributes:
        layer: that attends.
        dtype: of queries and of the pool.
        keys: of each line's sequence, float64.
        values: likewise.
    """

    native: ModuleType
    layer: LayerKV
    dtype: str = "float32"
    lines: int = 40
    slots: int = 8192
    longest: int = 4096
    seed: int = 0
    keys: dict[int, np.ndarray] = field(default_factory=dict)
    values: dict[int, np.ndarray] = field(default_factory=dict)
    owned: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout = KVLayout(layers=(self.layer,), page_size=1, dtype=self.dtype)
        self.pool = NativeKVPool(self.native, layout, self.slots, self.lines, self.longest)
        self.backend = NativeAttention(self.pool)
        self.rng = np.random.default_rng(self.seed)
        self._free = self.rng.permutation(np.arange(1, self.slots, dtype=np.int32))
        nothing = to_bits(np.array(np.nan), self.dtype)
        for leaf in self.pool.leaves():
            leaf.bits()[1:] = nothing
        self.pool.tables.bits()[:] = self.slots - 1

    def add(self, line: int, length: int, like: int | None = None, shared: int = 0, copied: bool = False) -> None:
        """A sequence of random keys and values; the first ``shared`` are those of ``like``, in its slots or copied."""
        slots, self._free = self._free[:length].copy(), self._free[length:]
        k, v = (
            from_bits(to_bits(self.rng.standard_normal((length, self.layer.kv_heads, dim)), self.dtype), self.dtype)
            for dim in (self.layer.k_dim, self.layer.v_dim)
        )
        if like is not None:
            k[:shared], v[:shared] = self.keys[like][:shared], self.values[like][:shared]
            if not copied:
                slots[:shared] = self.owned[like][:shared]
        self.keys[line], self.values[line], self.owned[line] = k, v, slots
        self.pool.keys[0].bits()[slots] = to_bits(k, self.dtype)
        self.pool.values[0].bits()[slots] = to_bits(v, self.dtype)
        self.pool.tables.bits()[:, line, :length] = slots

    def queries(self, count: int) -> np.ndarray:
        """Random queries, rounded to the type."""
        q = self.rng.standard_normal((count, self.layer.q_heads, self.layer.k_dim))
        return from_bits(to_bits(q, self.dtype), self.dtype)

    def attend(self, rows: list[tuple[int, np.ndarray, int]], sinks: np.ndarray | None = None) -> list[np.ndarray]:
        """Attend with ``(line, queries, length)``; gives each row's bits ``[queries, q_heads * v_dim]``."""
        native = self.native
        counts = [len(q) for _, q, _ in rows]
        starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        empty = np.zeros((0, self.layer.q_heads, self.layer.k_dim))
        plan = native.AttentionRows(
            self.pool.tables,
            self.layer.group,
            tensor(native, np.array([line for line, _, _ in rows]), "int32"),
            tensor(native, starts, "int32"),
            tensor(native, np.array([length for _, _, length in rows]), "int32"),
        )
        out = native.attention(
            tensor(native, np.concatenate([empty, *(q for _, q, _ in rows)]), self.dtype),
            self.pool.keys[0],
            self.pool.values[0],
            plan,
            self.layer.scale,
            self.layer.window or 0,
            self.layer.softcap or 0.0,
            None if sinks is None else tensor(native, sinks),
        )
        bits = np.array(out.bits())
        return [bits[a:b] for a, b in itertools.pairwise(starts)]
