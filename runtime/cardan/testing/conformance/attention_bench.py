"""Runs one attention step of a backend over scattered, dirty slots, and the same step densely in float64.

It knows no backend: keys and values that stand in the pool already are written by the backend itself, in steps before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cardan.ops import round_to
from cardan.ops.definitions import NumpyArray
from cardan.ops.rounding import ROUNDOFF
from cardan.platform import AttentionBackend, AttentionMeta, OpsDevice, OpsKVPool
from cardan.references.attention import attend
from cardan.testing.conformance.attention_bound import attention_bound
from cardan.types import ForwardMode, Int32Array, KVLayout, LayerKV, TableDelta, TableDeltas

WRITE_TOKENS = 256
"""Tokens written in one step while a pool is filled."""
SPARE_PAGES = 5
"""Pages that no row owns."""
FACTORS = (1.0, -1.0, 2.0)
"""Of the keys and values of several layers, so that none can stand in another's place."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a step.

    Attributes:
        cached: tokens that stand in the pool already.
        new: tokens that come with the step.
        shares: another, earlier row whose first ``shared`` tokens it reads from the same slots.
        shared: how many; whole pages.
    """

    cached: int
    new: int
    shares: int | None = None
    shared: int = 0

    @property
    def length(self) -> int:
        """Tokens after the step."""
        return self.cached + self.new


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step to try.

    Attributes:
        mode: what the rows do.
        rows: the sequences.
        layer: the layer that attends; its keys and values are as large as its scales of them say.
        dtype: type of queries, keys and values.
        kv_dtype: element type of the pool.
        page: tokens per page.
        dirty: whether every slot that no row owns holds NaN, but for the padding page.
        flat: whether tables change by flat arrays or run by run.
        grouped: whether there are three such layers, of which the second has slots of its own.
    """

    mode: ForwardMode
    rows: tuple[Row, ...]
    layer: LayerKV
    dtype: str
    kv_dtype: str
    page: int = 1
    dirty: bool = True
    flat: bool = True
    grouped: bool = False

    @property
    def layers(self) -> tuple[LayerKV, ...]:
        """The layers of the pool."""
        if not self.grouped:
            return (self.layer,)
        return tuple(replace(self.layer, index=index, group=index % 2) for index in range(len(FACTORS)))


@dataclass(slots=True)
class _Sequence:
    """What one row has: its line of the tables, its slots ``[groups, length]``, and its tensors in float64."""

    line: int
    row: Row
    slots: Int32Array
    q: NumpyArray
    k: NumpyArray
    v: NumpyArray


@dataclass(slots=True)
class AttentionBench:
    """A pool of one layer or of three, and a backend over it.

    Attributes:
        device: supplies both.
        name: of the backend.
        case: the step.
        seed: of tensors and slots.
        sinks: a score for each query head, or None.
        allowed: after a run, how far each of its results may be off.
    """

    device: OpsDevice
    name: str
    case: Case
    seed: int = 0
    sinks: NumpyArray | None = None
    allowed: NumpyArray = field(default_factory=lambda: np.zeros(0))
    _sequences: list[_Sequence] = field(default_factory=list)

    def run(self) -> tuple[NumpyArray, NumpyArray]:
        """What the backend gives and what dense attention does, float64 ``[layers * tokens, q_heads * v_dim]``."""
        case = self.case
        rng = np.random.default_rng(self.seed)
        pages = 1 + sum(-(-row.length // case.page) for row in case.rows) + SPARE_PAGES
        self._sequences = self._make_sequences(rng, pages)
        layout = KVLayout(layers=case.layers, page_size=case.page, dtype=case.kv_dtype)
        longest = max(*(row.length for row in case.rows), WRITE_TOKENS) + 2 * case.page
        pool = self.device.allocate_kv(layout, pages * case.page, len(case.rows) + 2, longest)
        with self.device.scope():
            backend = self.device.attention(self.name, pool, layout, case.dtype)
            if case.dirty:
                everywhere = np.arange(case.page, pages * case.page, dtype=np.int32)
                self._write_nan(backend, pool, np.tile(everywhere, (layout.num_groups, 1)), longest)
            self._write_cached(backend, pool)
            got = self._step(backend, pool, case.mode, [(s, s.row.cached, s.row.length) for s in self._sequences])
        want, allowed = [], []
        for layer, factor in zip(case.layers, FACTORS, strict=False):
            for sequence in self._sequences:
                queries, keys, values = sequence.q[sequence.row.cached :], factor * sequence.k, factor * sequence.v
                exact = attend(queries, keys, values, layer, self.sinks)
                want.append(exact.out)
                allowed.append(attention_bound(queries, keys, values, layer, exact, (case.dtype, case.kv_dtype)))
        self.allowed = np.concatenate(allowed)
        return got.astype(np.float64), np.concatenate(want)

    def _make_sequences(self, rng: np.random.Generator, pages: int) -> list[_Sequence]:
        case, layer = self.case, self.case.layer
        free = np.stack([rng.permutation(np.arange(1, pages, dtype=np.int32)) for _ in range(1 + case.grouped)])
        narrow = max(case.dtype, case.kv_dtype, key=lambda name: ROUNDOFF.get(name, 0.0))
        made: list[_Sequence] = []
        for number, row in enumerate(case.rows):
            count = -(-row.length // case.page)
            mine, free = free[:, :count], free[:, count:]
            slots = mine[:, :, None] * case.page + np.arange(case.page, dtype=np.int32)
            slots = slots.reshape(len(mine), -1)[:, : row.length]
            q, k, v = (
                size * rng.normal(size=(row.length, heads, dim))
                for heads, dim, size in (
                    (layer.q_heads, layer.k_dim, 1.0),
                    (layer.kv_heads, layer.k_dim, layer.k_scale),
                    (layer.kv_heads, layer.v_dim, layer.v_scale),
                )
            )
            k, v = round_to(k, narrow), round_to(v, narrow)
            if row.shares is not None:
                other = made[row.shares]
                slots[:, : row.shared] = other.slots[:, : row.shared]
                k[: row.shared], v[: row.shared] = other.k[: row.shared], other.v[: row.shared]
            # lines of the tables run backwards, so that rows and lines differ; line 0 is padding
            made.append(_Sequence(len(case.rows) - number, row, slots, round_to(q, case.dtype), k, v))
        return made

    def _write_nan(self, backend: AttentionBackend, pool: OpsKVPool, slots: Int32Array, longest: int) -> None:
        """NaN into all slots but the padding page, and tables that point there beyond each row's end."""
        line = len(self.case.rows) + 1
        layer = self.case.layer
        for start in range(0, slots.shape[1], WRITE_TOKENS):
            part = slots[:, start : start + WRITE_TOKENS]
            count = part.shape[1]
            nothing = np.full((count, 1, 1), np.nan)
            filler = _Sequence(
                line,
                Row(0, count),
                part,
                np.zeros((count, layer.q_heads, layer.k_dim)),
                np.broadcast_to(nothing, (count, layer.kv_heads, layer.k_dim)),
                np.broadcast_to(nothing, (count, layer.kv_heads, layer.v_dim)),
            )
            self._update(pool, [(line, 0, part)])
            self._step(backend, pool, ForwardMode.EXTEND, [(filler, 0, count)])
        stale = np.stack([np.resize(group, longest) for group in slots])
        self._update(pool, [(sequence.line, 0, stale) for sequence in self._sequences])

    def _write_cached(self, backend: AttentionBackend, pool: OpsKVPool) -> None:
        self._update(pool, [(s.line, 0, s.slots) for s in self._sequences])
        for sequence in self._sequences:
            for start in range(sequence.row.shared, sequence.row.cached, WRITE_TOKENS):
                stop = min(start + WRITE_TOKENS, sequence.row.cached)
                self._step(backend, pool, ForwardMode.EXTEND, [(sequence, start, stop)])

    def _update(self, pool: OpsKVPool, changes: Sequence[tuple[int, int, Int32Array]]) -> None:
        deltas = tuple(TableDelta(row_id=line, start=start, slots=slots) for line, start, slots in changes)
        if not self.case.flat:
            pool.update_tables(deltas)
            return
        pool.update_tables(
            TableDeltas(
                rows=np.concatenate([np.full(slots.shape[1], line, np.int32) for line, _, slots in changes]),
                positions=np.concatenate(
                    [np.arange(start, start + slots.shape[1]) for _, start, slots in changes]
                ).astype(np.int32),
                slots=np.concatenate([slots for _, _, slots in changes], axis=1),
            )
        )

    def _step(
        self,
        backend: AttentionBackend,
        pool: OpsKVPool,
        mode: ForwardMode,
        parts: Sequence[tuple[_Sequence, int, int]],
    ) -> NumpyArray:
        """Write tokens ``start .. stop`` of each sequence and attend with their queries."""
        ops, dtype = self.device.ops, self.case.dtype
        counts = [stop - start for _, start, stop in parts]
        meta = AttentionMeta(
            mode=mode,
            query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            seq_lens=np.array([stop for _, _, stop in parts], np.int32),
            row_ids=np.array([sequence.line for sequence, _, _ in parts], np.int32),
            positions=np.concatenate([np.arange(start, stop) for _, start, stop in parts]).astype(np.int32),
            out_slots=np.concatenate([s.slots[:, start:stop] for s, start, stop in parts], axis=1).astype(np.int32),
        )
        q, k, v = (
            np.concatenate([getattr(s, name)[start:stop] for s, start, stop in parts]).astype(np.float32)
            for name in ("q", "k", "v")
        )
        queries, plan = ops.from_host(q, dtype), backend.plan(meta)
        sinks = None if self.sinks is None else ops.from_host(self.sinks.astype(np.float32), "float32")
        results = []
        for layer, factor in zip(self.case.layers, FACTORS, strict=False):
            keys, values = (ops.from_host(np.float32(factor) * part, dtype) for part in (k, v))
            results.append(ops.to_host(backend.forward(queries, keys, values, layer, plan, sinks)))
        return np.concatenate(results)
