"""Runs one attention step of a backend over scattered, dirty slots, and the same step densely in float64.

It knows no backend: keys and values that stand in the pool already are written by the backend itself, in steps before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cardan.ops import round_to
from cardan.ops.definitions import NumpyArray
from cardan.ops.rounding import ROUNDOFF
from cardan.platform import AttentionBackend, AttentionMeta, OpsDevice, OpsKVPool
from cardan.testing.reference_attention import attend
from cardan.types import ForwardMode, Int32Array, KVLayout, LayerKV, TableDelta, TableDeltas

WRITE_TOKENS = 256
"""Tokens written in one step while a pool is filled."""
SPARE_PAGES = 5
"""Pages that no row owns."""


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
        layer: the layer that attends.
        dtype: type of queries, keys and values.
        kv_dtype: element type of the pool.
        page: tokens per page.
        dirty: whether every slot that no row owns holds NaN, but for the padding page.
        flat: whether tables change by flat arrays or run by run.
    """

    mode: ForwardMode
    rows: tuple[Row, ...]
    layer: LayerKV
    dtype: str
    kv_dtype: str
    page: int = 1
    dirty: bool = True
    flat: bool = True


@dataclass(slots=True)
class _Sequence:
    """What one row has: its line of the tables, its slots, and its tensors in float64."""

    line: int
    row: Row
    slots: Int32Array
    q: NumpyArray
    k: NumpyArray
    v: NumpyArray


@dataclass(slots=True)
class AttentionBench:
    """A pool of one layer, and a backend over it.

    Attributes:
        device: supplies both.
        name: of the backend.
        case: the step.
        seed: of tensors and slots.
    """

    device: OpsDevice
    name: str
    case: Case
    seed: int = 0
    sinks: NumpyArray | None = None
    _sequences: list[_Sequence] = field(default_factory=list)

    def run(self) -> tuple[NumpyArray, NumpyArray]:
        """What the backend gives and what dense attention does, float64 ``[tokens, q_heads * v_dim]``."""
        case = self.case
        rng = np.random.default_rng(self.seed)
        pages = 1 + sum(-(-row.length // case.page) for row in case.rows) + SPARE_PAGES
        self._sequences = self._make_sequences(rng, pages)
        layout = KVLayout(layers=(case.layer,), page_size=case.page, dtype=case.kv_dtype)
        longest = max(*(row.length for row in case.rows), WRITE_TOKENS) + 2 * case.page
        pool = self.device.allocate_kv(layout, pages * case.page, len(case.rows) + 2, longest)
        with self.device.scope():
            backend = self.device.attention(self.name, pool, layout, case.dtype)
            if case.dirty:
                self._write_nan(backend, pool, np.arange(case.page, pages * case.page, dtype=np.int32), longest)
            self._write_cached(backend, pool)
            got = self._step(backend, pool, case.mode, [(s, s.row.cached, s.row.length) for s in self._sequences])
        want = [attend(s.q[s.row.cached :], s.k, s.v, case.layer, self.sinks).out for s in self._sequences]
        return got.astype(np.float64), np.concatenate(want)

    def _make_sequences(self, rng: np.random.Generator, pages: int) -> list[_Sequence]:
        case, layer = self.case, self.case.layer
        free = rng.permutation(np.arange(1, pages, dtype=np.int32))
        narrow = max(case.dtype, case.kv_dtype, key=lambda name: ROUNDOFF[name])
        made: list[_Sequence] = []
        for number, row in enumerate(case.rows):
            count = -(-row.length // case.page)
            mine, free = free[:count], free[count:]
            slots = (mine[:, None] * case.page + np.arange(case.page, dtype=np.int32)).reshape(-1)[: row.length]
            q, k, v = (
                rng.normal(size=(row.length, heads, dim))
                for heads, dim in (
                    (layer.q_heads, layer.k_dim),
                    (layer.kv_heads, layer.k_dim),
                    (layer.kv_heads, layer.v_dim),
                )
            )
            k, v = round_to(k, narrow), round_to(v, narrow)
            if row.shares is not None:
                other = made[row.shares]
                slots[: row.shared] = other.slots[: row.shared]
                k[: row.shared], v[: row.shared] = other.k[: row.shared], other.v[: row.shared]
            # lines of the tables run backwards, so that rows and lines differ; line 0 is padding
            made.append(_Sequence(len(case.rows) - number, row, slots, round_to(q, case.dtype), k, v))
        return made

    def _write_nan(self, backend: AttentionBackend, pool: OpsKVPool, slots: Int32Array, longest: int) -> None:
        """NaN into all slots but the padding page, and tables that point there beyond each row's end."""
        line = len(self.case.rows) + 1
        layer = self.case.layer
        for start in range(0, len(slots), WRITE_TOKENS):
            part = slots[start : start + WRITE_TOKENS]
            nothing = np.full((len(part), 1, 1), np.nan)
            filler = _Sequence(
                line,
                Row(0, len(part)),
                part,
                np.zeros((len(part), layer.q_heads, layer.k_dim)),
                np.broadcast_to(nothing, (len(part), layer.kv_heads, layer.k_dim)),
                np.broadcast_to(nothing, (len(part), layer.kv_heads, layer.v_dim)),
            )
            self._update(pool, [(line, 0, part)])
            self._step(backend, pool, ForwardMode.EXTEND, [(filler, 0, len(part))])
        stale = np.resize(slots, longest)
        self._update(pool, [(sequence.line, 0, stale) for sequence in self._sequences])

    def _write_cached(self, backend: AttentionBackend, pool: OpsKVPool) -> None:
        self._update(pool, [(s.line, 0, s.slots) for s in self._sequences])
        for sequence in self._sequences:
            for start in range(sequence.row.shared, sequence.row.cached, WRITE_TOKENS):
                stop = min(start + WRITE_TOKENS, sequence.row.cached)
                self._step(backend, pool, ForwardMode.EXTEND, [(sequence, start, stop)])

    def _update(self, pool: OpsKVPool, changes: Sequence[tuple[int, int, Int32Array]]) -> None:
        deltas = tuple(TableDelta(row_id=line, start=start, slots=slots[None]) for line, start, slots in changes)
        if not self.case.flat:
            pool.update_tables(deltas)
            return
        pool.update_tables(
            TableDeltas(
                rows=np.concatenate([np.full(len(slots), line, np.int32) for line, _, slots in changes]),
                positions=np.concatenate([np.arange(start, start + len(slots)) for _, start, slots in changes]).astype(
                    np.int32
                ),
                slots=np.concatenate([slots for _, _, slots in changes])[None],
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
            out_slots=np.concatenate([s.slots[start:stop] for s, start, stop in parts])[None].astype(np.int32),
        )
        q, k, v = (
            ops.from_host(np.concatenate(arrays).astype(np.float32), dtype)
            for arrays in (
                [s.q[start:stop] for s, start, stop in parts],
                [s.k[start:stop] for s, start, stop in parts],
                [s.v[start:stop] for s, start, stop in parts],
            )
        )
        sinks = None if self.sinks is None else ops.from_host(self.sinks.astype(np.float32), "float32")
        return ops.to_host(backend.forward(q, k, v, self.case.layer, backend.plan(meta), sinks))
