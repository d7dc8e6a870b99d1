"""Attention over slots against a dense float64 reference that is written out here from the definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cardan.errors import UnsupportedError
from cardan.platform import AttentionMeta, DeviceInfo
from cardan.types import ForwardMode, KVKind, KVLayout, LayerKV, TableDelta, TableDeltas
from cardan_cpu.device import CpuDevice
from cardan_torch import TorchAttention, TorchKVPool

SLOTS = 4096
INFO = DeviceInfo(index=0, name="test")
TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2, "float16": 3e-3}


@dataclass
class Row:
    """One sequence: ``cached`` tokens stand in the pool already, ``new`` ones come with the step."""

    cached: int
    new: int


def layer(**changes: object) -> LayerKV:
    sizes: dict[str, object] = {
        "index": 0,
        "q_heads": 6,
        "kv_heads": 2,
        "k_dim": 16,
        "v_dim": 16,
        "scale": 0.25,
    }
    return LayerKV(**{**sizes, **changes})  # type: ignore[arg-type]


def dense(q, k, v, kv: LayerKV, sinks):
    """Queries stand at the end of the keys. All float64; ``q: [n, heads, dim]``, ``k, v: [length, kv_heads, dim]``."""
    n, length = len(q), len(k)
    shared = kv.q_heads // kv.kv_heads
    out = np.zeros((n, kv.q_heads, kv.v_dim))
    for head in range(kv.q_heads):
        keys, values = k[:, head // shared], v[:, head // shared]
        for i in range(n):
            position = length - n + i
            first = 0 if kv.window is None else max(0, position - kv.window + 1)
            scores = keys[first : position + 1] @ q[i, head] * kv.scale
            if kv.softcap:
                scores = kv.softcap * np.tanh(scores / kv.softcap)
            top = scores.max() if sinks is None else max(scores.max(), sinks[head])
            weights = np.exp(scores - top)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - top))
            out[i, head] = weights @ values[first : position + 1] / total
    return out.reshape(n, -1)


def run(rows: list[Row], kv: LayerKV, *, mode: ForwardMode, dtype: str = "float32", page: int = 1, sinks=None, seed=0):
    """A step over scattered slots; every slot that no row owns holds NaN, but for the padding page."""
    rng = np.random.default_rng(seed)
    kind = getattr(torch, dtype)
    layout = KVLayout(layers=(kv,), page_size=page, dtype=dtype)
    pool = TorchKVPool(layout, SLOTS, len(rows) + 1, 1024, torch.device("cpu"))
    pages = rng.permutation(np.arange(1, SLOTS // page))
    pool.keys[0].fill_(float("nan"))
    pool.values[0].fill_(float("nan"))
    pool.keys[0][:page] = 0
    pool.values[0][:page] = 0
    deltas, wanted, parts, out_slots = [], [], [], []
    for number, row in enumerate(rows):
        length = row.cached + row.new
        mine, pages = pages[: -(-length // page)], pages[-(-length // page) :]
        slots = (mine[:, None] * page + np.arange(page)).reshape(-1)[:length]
        q, k, v = (
            torch.from_numpy(rng.standard_normal(shape)).to(kind)
            for shape in (
                (row.new, kv.q_heads, kv.k_dim),
                (length, kv.kv_heads, kv.k_dim),
                (length, kv.kv_heads, kv.v_dim),
            )
        )
        pool.keys[0][slots[: row.cached]] = k[: row.cached]
        pool.values[0][slots[: row.cached]] = v[: row.cached]
        # the row's line of the table is its number, backwards, so that rows and lines differ
        deltas.append(TableDelta(row_id=len(rows) - number, start=0, slots=slots[None].astype(np.int32)))
        out_slots.append(slots[row.cached :])
        parts.append((q, k[row.cached :], v[row.cached :]))
        wanted.append(dense(*(x.double().numpy() for x in (q, k, v)), kv, sinks))
    pool.update_tables(tuple(deltas))
    counts = np.array([row.new for row in rows])
    lengths = np.array([row.cached + row.new for row in rows], np.int32)
    meta = AttentionMeta(
        mode=mode,
        query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        seq_lens=lengths,
        row_ids=np.arange(len(rows), 0, -1, dtype=np.int32),
        positions=np.concatenate([np.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]).astype(np.int32),
        out_slots=np.concatenate(out_slots)[None].astype(np.int32),
    )
    backend = TorchAttention(pool)
    q, k, v = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    on_device = None if sinks is None else torch.from_numpy(sinks)
    got = backend.forward(q, k, v, kv, backend.plan(meta), on_device)
    return got.double().numpy(), np.concatenate(wanted)


def error(got: np.ndarray, want: np.ndarray) -> float:
    assert not np.isnan(got).any()
    return float((np.abs(got - want).max(-1) / np.abs(want).max(-1)).max())


DECODE = [Row(n - 1, 1) for n in (1, 2, 17, 64, 600, 599, 301, 100)]
PREFILL = [Row(0, 1), Row(0, 33), Row(100, 20), Row(63, 65), Row(0, 300), Row(511, 2)]
MIXED = [Row(0, 40), Row(55, 1), Row(64, 64), Row(600, 1), Row(1, 1)]
BATCHES = [(ForwardMode.DECODE, DECODE), (ForwardMode.EXTEND, PREFILL), (ForwardMode.MIXED, MIXED)]
BATCHES += [(ForwardMode.DECODE, [Row(n, 1)]) for n in (0, 575)] + [(ForwardMode.EXTEND, [Row(0, 257)])]
KINDS = {
    "grouped": {},
    "one-to-one": {"q_heads": 3, "kv_heads": 3},
    "one-key-head": {"q_heads": 5, "kv_heads": 1, "k_dim": 8, "v_dim": 8},
    "window": {"window": 37, "kind": KVKind.SLIDING},
    "window-of-one": {"window": 1, "kind": KVKind.SLIDING},
    "softcap": {"softcap": 2.0},
    "softcap-window": {"softcap": 2.0, "window": 50, "kind": KVKind.SLIDING},
    "wide-values": {"k_dim": 8, "v_dim": 24},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "rows"), BATCHES)
def test_matches_dense_attention(mode: ForwardMode, rows: list[Row], kind: str) -> None:
    assert error(*run(rows, layer(**KINDS[kind]), mode=mode)) < TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("mode", "rows"), BATCHES[:3])
def test_narrow_types_lose_their_rounding_only(mode: ForwardMode, rows: list[Row], dtype: str) -> None:
    for kind in ("grouped", "softcap-window"):
        assert error(*run(rows, layer(**KINDS[kind]), mode=mode, dtype=dtype)) < TOLERANCE[dtype]


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(("mode", "rows"), BATCHES[:3])
def test_page_sizes_change_nothing(mode: ForwardMode, rows: list[Row], page: int) -> None:
    assert error(*run(rows, layer(), mode=mode, page=page)) < TOLERANCE["float32"]


@pytest.mark.parametrize(("mode", "rows"), BATCHES[:3])
def test_sinks_take_their_share(mode: ForwardMode, rows: list[Row]) -> None:
    sinks = np.linspace(-1.0, 4.0, 6)
    got, want = run(rows, layer(sinks=True), mode=mode, sinks=sinks)
    assert error(got, want) < TOLERANCE["float32"]


@pytest.mark.parametrize("changes", [{}, {"window": 90, "kind": KVKind.SLIDING}, {"softcap": 3.0}])
def test_small_blocks_of_queries_change_nothing(changes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cardan_torch.attention_plan.BLOCK_BYTES", 40_000)
    rows = [Row(130, 200), Row(0, 50)]
    assert error(*run(rows, layer(**changes), mode=ForwardMode.EXTEND)) < TOLERANCE["float32"]


def test_no_mask_or_score_matrix_exceeds_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    from cardan_torch import attention, attention_plan

    monkeypatch.setattr(attention_plan, "BLOCK_BYTES", 100_000)
    sizes = []
    attend = attention._attend

    def spy(queries, keys, *rest):
        sizes.append(4 * queries.shape[1] * queries.shape[2] * keys.shape[2])
        return attend(queries, keys, *rest)

    monkeypatch.setattr(attention, "_attend", spy)
    run([Row(300, 200)], layer(softcap=1.0), mode=ForwardMode.EXTEND)
    assert len(sizes) > 10
    assert max(sizes) * 3 <= 100_000 * 3


def test_a_query_alone_gives_what_it_gives_among_others() -> None:
    together, _ = run(DECODE, layer(), mode=ForwardMode.DECODE, seed=3)
    alone, _ = run(DECODE[:1], layer(), mode=ForwardMode.DECODE, seed=3)
    assert np.abs(together[0] - alone[0]).max() < 1e-5


def test_flat_table_changes_write_what_the_runs_write() -> None:
    layout = KVLayout(layers=(layer(), layer(index=1, group=1)), page_size=1, dtype="float32")
    pools = [TorchKVPool(layout, 8, 4, 16, torch.device("cpu")) for _ in range(2)]
    flat = TableDeltas(
        rows=np.array([1, 1, 3], np.int32),
        positions=np.array([4, 5, 0], np.int32),
        slots=np.array([[1, 2, 3], [4, 5, 6]], np.int32),
    )
    pools[0].update_tables(flat)
    pools[1].update_tables(tuple(flat))
    assert torch.equal(pools[0].tables, pools[1].tables)
    assert pools[0].tables[1, 1, 4:6].tolist() == [4, 5]
    pools[0].update_tables(TableDeltas(rows=flat.rows[:0], positions=flat.rows[:0], slots=flat.slots[:, :0]))


def test_a_fresh_pool_is_zero_and_counts_its_bytes() -> None:
    layout = KVLayout(layers=(layer(k_dim=8, v_dim=24), layer(index=1)), page_size=1, dtype="bfloat16")
    pool = TorchKVPool(layout, 10, 2, 16, torch.device("cpu"))
    assert pool.num_bytes == 10 * layout.bytes_per_slot
    assert all(not leaf.any() for leaf in pool.leaves())
    other = [torch.ones_like(leaf) for leaf in pool.leaves()]
    pool.bind(other)
    assert all(mine is given for mine, given in zip(pool.leaves(), other, strict=True))


def test_refuses_a_backend_of_another_name() -> None:
    device = CpuDevice(INFO, threads=torch.get_num_threads())
    layout = KVLayout(layers=(layer(),), page_size=1, dtype="float32")
    pool = device.allocate_kv(layout, 8, 2, 16)
    with pytest.raises(UnsupportedError, match=r"got 'flash'\. Pass --attention-backend torch"):
        device.attention("flash", pool, layout, "float32")
