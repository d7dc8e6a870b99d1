"""Attention of a recorded decode step, replayed over rows and lengths that it was not recorded with."""

from __future__ import annotations

import numpy as np
import pytest

native_kernels = pytest.importorskip("cardan_native")

from native_bench import Stage, layer_kv, tensor, to_bits  # noqa: E402

from cardan.platform import AttentionMeta  # noqa: E402
from cardan.types import ForwardMode  # noqa: E402

VARIANTS = native_kernels.available()
ROWS = 4


def meta_of(stage: Stage, lines: list[int], lengths: list[int]) -> AttentionMeta:
    """A decode step that writes each row's last token."""
    count = len(lines)
    slots = np.array([stage.owned[line][n - 1] for line, n in zip(lines, lengths, strict=True)], np.int32)
    return AttentionMeta(
        mode=ForwardMode.DECODE,
        query_starts=np.arange(count + 1, dtype=np.int32),
        seq_lens=np.array(lengths, np.int32),
        row_ids=np.array(lines, np.int32),
        positions=np.array(lengths, np.int32) - 1,
        out_slots=slots[None],
    )


class Step:
    """Attention of one layer with inputs whose memory stays, as a graph runner would hold them."""

    def __init__(self, stage: Stage) -> None:
        native, layer = stage.native, stage.layer
        self.stage = stage
        self.q = tensor(native, np.zeros((ROWS, layer.q_heads, layer.k_dim)))
        self.k = tensor(native, np.zeros((ROWS, layer.kv_heads, layer.k_dim)))
        self.v = tensor(native, np.zeros((ROWS, layer.kv_heads, layer.v_dim)))
        self.plan = stage.backend.fixed_plan(ROWS)
        self.sinks = tensor(native, np.zeros(layer.q_heads)) if layer.sinks else None
        self.graph = native.Graph()
        with self.graph:
            self.out = stage.backend.forward(self.q, self.k, self.v, layer, self.plan, self.sinks)

    def fill(self, arrays: list[np.ndarray]) -> None:
        for to, values in zip((self.q, self.k, self.v), arrays, strict=True):
            whole = np.zeros(tuple(to.shape))
            whole[: len(values)] = values
            to.copy_bits(to_bits(whole, "float32"))


@pytest.mark.parametrize("kind", [{}, {"window": 270}, {"sinks": True, "softcap": 3.0}])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_replay_follows_the_plan(variant: str, kind: dict[str, object]) -> None:
    native = native_kernels.load(variant)
    stage = Stage(native, layer_kv(**kind))
    for line, length in enumerate((3, 2000, 700, 256, 257, 1), start=1):
        stage.add(line, length)
    step = Step(stage)
    layer, rng = stage.layer, stage.rng
    for lines, lengths in (([1, 2, 3, 4], [3, 2000, 700, 256]), ([5, 2], [257, 1999]), ([6], [1]), ([3, 4], [600, 1])):
        meta = meta_of(stage, lines, lengths)
        arrays = [
            rng.standard_normal((len(lines), heads, dim)).astype(np.float32)
            for heads, dim in ((layer.q_heads, 16), (layer.kv_heads, 16), (layer.kv_heads, 16))
        ]
        pool_before = [np.array(leaf.bits()) for leaf in stage.pool.leaves()]
        eager = stage.backend.forward(*(tensor(native, x) for x in arrays), layer, stage.backend.plan(meta), step.sinks)
        pool_after = [np.array(leaf.bits()) for leaf in stage.pool.leaves()]
        for leaf, bits in zip(stage.pool.leaves(), pool_before, strict=True):
            leaf.copy_bits(bits)
        step.plan.refill(meta)
        step.fill(arrays)
        step.graph.replay()
        got = np.array(step.out.bits())
        np.testing.assert_array_equal(got[: len(lines)], np.array(eager.bits()))
        assert not got[len(lines) :].any()
        for leaf, bits in zip(stage.pool.leaves(), pool_after, strict=True):
            np.testing.assert_array_equal(np.array(leaf.bits()), bits)


def test_a_replay_follows_the_tables() -> None:
    """A row that moved to other slots is found there."""
    native = native_kernels.load()
    stage = Stage(native, layer_kv())
    stage.add(1, 40)
    stage.add(2, 40, like=1, shared=40, copied=True)
    step = Step(stage)
    q = stage.queries(1)
    k, v = stage.keys[1][-1:], stage.values[1][-1:]
    step.fill([q, k, v])
    step.plan.refill(meta_of(stage, [1], [40]))
    step.graph.replay()
    before = np.array(step.out.bits())
    stage.pool.keys[0].bits()[stage.owned[1]] = np.nan
    stage.pool.tables.bits()[:, 1, :40] = stage.owned[2]
    stage.owned[1] = stage.owned[2]
    step.plan.refill(meta_of(stage, [1], [40]))
    step.graph.replay()
    np.testing.assert_array_equal(np.array(step.out.bits()), before)


def test_a_plan_takes_no_more_rows_than_it_has() -> None:
    stage = Stage(native_kernels.load(), layer_kv())
    for line in range(1, 4):
        stage.add(line, 4)
    plan = stage.backend.fixed_plan(2)
    with pytest.raises(ValueError, match=r"A plan of 2 rows takes up to 2 rows of one token each, got 3 rows of 3"):
        plan.refill(meta_of(stage, [1, 2, 3], [4, 4, 4]))


def test_a_plan_holds_the_step() -> None:
    stage = Stage(native_kernels.load(), layer_kv())
    for line in (1, 2):
        stage.add(line, 4)
    meta = meta_of(stage, [2, 1], [3, 4])
    plan = stage.backend.plan(meta)
    filled = stage.backend.fixed_plan(3)
    addresses = [x.bits().ctypes.data for x in (filled.seq_lens, filled.out_slots)]
    filled.refill(meta)
    assert [x.bits().ctypes.data for x in (filled.seq_lens, filled.out_slots)] == addresses
    for name in ("row_ids", "seq_lens", "positions", "out_slots"):
        np.testing.assert_array_equal(getattr(plan, name).bits(), getattr(meta, name))
        np.testing.assert_array_equal(getattr(filled, name).bits()[..., :2], getattr(meta, name))
    assert filled.num_rows == 3
    assert filled.seq_lens.bits()[2] == 0
    assert filled.out_slots.bits()[0, 2] == -1
