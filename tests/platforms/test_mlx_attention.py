"""MLX's attention over slots and tail, step after step, against dense float64 attention."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from dense_attention import dense_attention  # noqa: E402

from cardan.errors import UnsupportedError  # noqa: E402
from cardan.platform import AttentionMeta, DeviceInfo  # noqa: E402
from cardan.types import ForwardMode, KVKind, KVLayout, LayerKV, TableDelta, TableDeltas  # noqa: E402
from cardan_mlx import attention_plan  # noqa: E402
from cardan_mlx.attention import MlxAttention  # noqa: E402
from cardan_mlx.device import MlxDevice  # noqa: E402
from cardan_mlx.kv_pool import TAIL_STEPS, MlxKVPool  # noqa: E402
from cardan_mlx.ops import to_numpy  # noqa: E402

NUM_SLOTS = 4096
NUM_ROWS = 9
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Largest relative error of rounding to a type."""
FUNCTION_ULPS = 4
"""What an exponential or a hyperbolic tangent in float32 may be off, in units of the last place."""
SIZES = {"index": 0, "q_heads": 6, "kv_heads": 2, "k_dim": 16, "v_dim": 16, "scale": 0.25}
KINDS = {
    "grouped": {},
    "one-to-one": {"q_heads": 3, "kv_heads": 3},
    "one-key-head": {"q_heads": 5, "kv_heads": 1, "k_dim": 8, "v_dim": 8},
    "window": {"window": 37, "kind": KVKind.SLIDING},
    "window-of-one": {"window": 1, "kind": KVKind.SLIDING},
    "softcap": {"softcap": 2.0},
    "softcap-window": {"softcap": 2.0, "window": 50, "kind": KVKind.SLIDING},
}


def layer(**changes):
    return LayerKV(**{**SIZES, **changes})


def gamma(count):
    """Relative error of a float32 sum of ``count`` products (Higham, Accuracy and Stability, section 3.1)."""
    return count * ROUNDING["float32"] / (1 - count * ROUNDING["float32"])


def allowed_errors(q, keys, values, kv, dtype, sinks=None):
    """How far each result of ``dense_attention`` may be off in ``dtype``: ``[n, q_heads * v_dim]``.

    A score is off by d: its sum of products, and where the type is narrow its query times the scale and itself once
    each; with a soft-cap also what the tangent adds. A weight then is off by a factor of exp(2 d), the exponential's
    own error and the sum of all weights; a result by its sum of products. Weights and results are rounded to the type.
    """
    narrow = ROUNDING[dtype]
    grouped = np.repeat(np.abs(keys), kv.q_heads // kv.kv_heads, axis=1).astype(np.float64)
    size = np.einsum("nhd,mhd->nhm", np.abs(q), grouped).max(axis=-1) * abs(kv.scale)
    score = size * (gamma(kv.k_dim + 2) + (2 * narrow if dtype != "float32" else 0))
    if kv.softcap is not None:
        # dividing by the cap and multiplying with it again round once each; the tangent has no slope above 1
        score += (2 * FUNCTION_ULPS + 2) * ROUNDING["float32"] * np.minimum(size, kv.softcap)
    if sinks is not None:
        score = np.maximum(score, ROUNDING[dtype] * np.abs(sinks).max())
    # the difference to the greatest score is rounded too
    score = score + 2 * ROUNDING["float32"] * size
    weight = np.expm1(2 * score) + 2 * FUNCTION_ULPS * ROUNDING["float32"] + 2 * gamma(len(keys) + 1) + 2 * narrow
    spread = dense_attention(q, keys, np.abs(values), kv, sinks)
    return spread * np.repeat(weight, kv.v_dim, axis=1)


class Sequences:
    """Rows that grow by steps; slots are scattered, and all that no row owns hold NaN but for slot 0."""

    def __init__(self, kv, dtype="float32", num_slots=NUM_SLOTS, sinks=None, kv_dtype=None):
        layout = KVLayout(layers=(kv,), page_size=1, dtype=kv_dtype or dtype)
        self.kv, self.dtype, self.sinks = kv, dtype, sinks
        self.kv_dtype = kv_dtype or dtype
        self.pool = MlxKVPool(layout, num_slots, NUM_ROWS, 1024, mx.synchronize)
        for array in (self.pool.keys[0], self.pool.values[0]):
            array[1:] = mx.nan
        self.backend = MlxAttention(self.pool)
        self.rng = np.random.default_rng(0)
        self.free = list(self.rng.permutation(np.arange(1, num_slots)))
        self.slots, self.keys, self.values = {}, {}, {}

    def drop(self, row):
        """Give a row's slots back, to be taken next."""
        self.free = list(self.slots.pop(row)) + self.free
        del self.keys[row], self.values[row]

    def step(self, parts, mode=None):
        """``(row, new tokens)``; the result must be dense attention's over what the pool holds of keys and values."""
        q, k, v, out_slots, deltas, want, allowed = [], [], [], [], [], [], []
        lengths, kv = [], self.kv
        for row, count in parts:
            fresh, self.free = self.free[:count], self.free[count:]
            before = self.slots.setdefault(row, [])
            deltas.append(TableDelta(row_id=row, start=len(before), slots=np.array([fresh], np.int32)))
            before += fresh
            out_slots += fresh
            new = [
                self._values((count, heads, dim))
                for heads, dim in ((kv.q_heads, kv.k_dim), (kv.kv_heads, kv.k_dim), (kv.kv_heads, kv.v_dim))
            ]
            for parts_of, value in zip((q, k, v), new, strict=True):
                parts_of.append(value)
            for held, value in ((self.keys, new[1]), (self.values, new[2])):
                kept = self._rounded(value, self.kv_dtype)
                held[row] = np.concatenate((held[row], kept)) if row in held else kept
            seen = (new[0], self.keys[row], self.values[row], kv)
            want.append(dense_attention(*seen, self.sinks))
            allowed.append(allowed_errors(*seen, self.dtype, self.sinks))
            lengths.append(len(before))
        counts = np.array([count for _, count in parts])
        self.pool.update_tables(tuple(deltas))
        meta = AttentionMeta(
            mode=mode or (ForwardMode.DECODE if (counts == 1).all() else ForwardMode.EXTEND),
            query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            seq_lens=np.array(lengths, np.int32),
            row_ids=np.array([row for row, _ in parts], np.int32),
            positions=np.concatenate([np.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]),
            out_slots=np.array([out_slots], np.int32),
        )
        arrays = [mx.array(np.concatenate(x)).astype(getattr(mx, self.dtype)) for x in (q, k, v)]
        sinks = None if self.sinks is None else mx.array(self.sinks.astype(np.float32))
        got = to_numpy(self.backend.forward(*arrays, kv, self.backend.plan(meta), sinks)).astype(np.float64)
        assert not np.isnan(got).any()
        excess = np.abs(got - np.concatenate(want)) / np.concatenate(allowed)
        assert excess.max() <= 1, f"{parts}: off by {excess.max():.3g} times what rounding explains"

    def _values(self, shape):
        return self._rounded(self.rng.standard_normal(shape).astype(np.float32), self.dtype)

    @staticmethod
    def _rounded(values, dtype):
        return to_numpy(mx.array(values).astype(getattr(mx, dtype))).astype(np.float32)


def live_through(sequences):
    """Prefill, decode beyond two folds, new rows between, mixed steps, slots taken over by others."""
    sequences.step([(1, 40), (2, 1), (3, 300), (4, 2)])
    for number in range(2 * TAIL_STEPS + 3):
        sequences.step([(3, 1), (1, 1), (2, 1), (4, 1)])
        if number == 5:
            sequences.drop(2)
            sequences.step([(2, 3)])
        if number == 11:
            sequences.drop(4)
            sequences.step([(4, 1), (3, 1)], ForwardMode.DECODE)
    sequences.step([(1, 1), (5, 33), (3, 20), (4, 1)], ForwardMode.MIXED)
    sequences.step([(5, 1)])
    sequences.step([(row, 1) for row in (5, 4, 3, 2, 1)])


@pytest.mark.parametrize("kind", KINDS)
def test_matches_dense_attention_through_a_life_of_steps(kind):
    live_through(Sequences(layer(**KINDS[kind])))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_stay_within_their_rounding(dtype):
    live_through(Sequences(layer(), dtype))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_the_pool_may_be_narrower_than_the_activations(kv_dtype):
    live_through(Sequences(layer(), kv_dtype=kv_dtype))


@pytest.mark.parametrize("kind", ["grouped", "softcap"])
def test_sinks_take_their_share(kind):
    sequences = Sequences(layer(**KINDS[kind]), sinks=np.random.default_rng(5).normal(size=6) * 2)
    live_through(sequences)


def test_a_small_pool_folds_its_tail_more_often():
    sequences = Sequences(layer(), num_slots=700)
    assert sequences.pool.tail_tokens == NUM_ROWS
    live_through(sequences)


@pytest.mark.parametrize("kind", ["grouped", "window", "softcap", "softcap-window"])
def test_long_prompts_go_in_blocks(kind, monkeypatch):
    monkeypatch.setattr(attention_plan, "SCORE_BYTES", 6 * 4 * 400 * 32)
    sequences = Sequences(layer(**KINDS[kind]))
    sequences.step([(1, 300), (2, 5)])
    sequences.step([(1, 100)])


def test_decode_rows_of_unlike_length_are_attended_to_apart(monkeypatch):
    monkeypatch.setattr(attention_plan, "GATHERED_KEYS", 64)
    sequences = Sequences(layer())
    sequences.step([(1, 9), (2, 200), (3, 30), (4, 31), (5, 29)])
    for _ in range(3):
        sequences.step([(row, 1) for row in (1, 2, 3, 4, 5)])


def test_tables_take_flat_deltas():
    pool = Sequences(layer()).pool
    flat = TableDeltas(
        rows=np.array([1, 1, 3], np.int32),
        positions=np.array([4, 5, 0], np.int32),
        slots=np.array([[7, 8, 9]], np.int32),
    )
    pool.update_tables(flat)
    assert pool.tables[0, 1, 4:6].tolist() == [7, 8]
    assert pool.tables[0, 3, 0] == 9


def test_leaves_can_be_bound_again():
    pool = Sequences(layer()).pool
    leaves = pool.leaves()
    pool.bind([leaf + 1 for leaf in leaves])
    assert [leaf.shape for leaf in pool.leaves()] == [leaf.shape for leaf in leaves]
    assert float(pool.tail_values[0].sum()) == pool.tail_values[0].size
    assert pool.num_bytes == sum(leaf.nbytes for leaf in leaves)


def test_a_backend_that_is_not_there_is_refused():
    device = MlxDevice(DeviceInfo(index=0, name="test"))
    pool = device.allocate_kv(KVLayout(layers=(layer(),), page_size=1, dtype="float32"), 64, 2, 32)
    with pytest.raises(
        UnsupportedError, match=r"Attention backend must be one of gather on test, got 'metal'. Pass --"
    ):
        device.attention("metal", pool, pool.layout, "float32")
    with pytest.raises(TypeError, match=r"the pool must come from this device's allocate_kv, got str"):
        device.attention("gather", "a pool", pool.layout, "float32")
