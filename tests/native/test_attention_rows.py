"""What rows of a batch do to each other in native attention: nothing, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

native_kernels = pytest.importorskip("cardan_native")

from native_bench import Stage, from_bits, layer_kv, to_bits  # noqa: E402

VARIANTS = native_kernels.available()
ROWS = [(1, 300), (1, 1), (40, 350), (1, 1000), (3, 515), (100, 100), (1, 512), (17, 40), (1, 2100), (2, 256)]
KINDS: dict[str, dict[str, object]] = {
    "grouped": {},
    "heads-of-64": {"q_heads": 9, "kv_heads": 3, "k_dim": 64, "v_dim": 64},
    "window": {"window": 300},
    "softcap": {"softcap": 5.0},
    "odd-heads": {"k_dim": 13, "v_dim": 7},
}


@pytest.fixture(params=VARIANTS)
def native(request: pytest.FixtureRequest) -> Iterator[object]:
    kernels = native_kernels.load(request.param)
    before = kernels.threads()
    yield kernels
    kernels.set_threads(before)


def staged(native, kind: str, dtype: str = "float32") -> tuple[Stage, list[tuple[int, np.ndarray, int]]]:
    stage = Stage(native, layer_kv(**KINDS[kind]), dtype=dtype)
    rows = []
    for line, (count, length) in enumerate(ROWS, start=1):
        stage.add(line, length)
        rows.append((line, stage.queries(count), length))
    return stage, rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gets_the_same_bits_alone_and_among_mates(native, kind: str, dtype: str) -> None:
    stage, rows = staged(native, kind, dtype)
    together = stage.attend(rows)
    backwards = stage.attend(rows[::-1])[::-1]
    for row, one, other in zip(rows, together, backwards, strict=True):
        alone = stage.attend([row])[0]
        np.testing.assert_array_equal(one, alone)
        np.testing.assert_array_equal(other, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit(native, kind: str) -> None:
    stage, rows = staged(native, kind)
    native.set_threads(1)
    one = stage.attend(rows)
    for threads in (2, 3):
        native.set_threads(threads)
        for a, b in zip(one, stage.attend(rows), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["grouped", "heads-of-64", "softcap", "window"])
def test_a_shared_prefix_changes_no_bit(native, kind: str) -> None:
    """Rows over the same slots, and rows over copies of them elsewhere."""
    results = []
    for copied in (False, True):
        stage = Stage(native, layer_kv(**KINDS[kind]), slots=40000)
        stage.add(1, 1400)
        for line in range(2, 30):
            # branches off the first row, and off a branch
            stage.add(
                line, 800 + 17 * line, like=1 if line < 14 else 2, shared=800 if line < 14 else 830, copied=copied
            )
        rows = [(line, stage.queries(1 + line % 3), len(stage.keys[line])) for line in range(1, 30)]
        results.append(stage.attend(rows))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_stays_in_its_query(native, kind: str) -> None:
    stage, rows = staged(native, kind)
    clean = stage.attend(rows)
    for place, (line, q, length) in enumerate(rows):
        spoilt = q.copy()
        spoilt[-1, 0, 0] = np.nan
        got = stage.attend([*rows[:place], (line, spoilt, length), *rows[place + 1 :]])
        for other, (a, b) in enumerate(zip(clean, got, strict=True)):
            if other != place:
                np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(clean[place][:-1], got[place][:-1])
        width = stage.layer.v_dim
        assert np.isnan(got[place][-1, :width]).all()
        np.testing.assert_array_equal(clean[place][-1, width:], got[place][-1, width:])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_spoilt_sequence_stays_alone(native, value: float) -> None:
    stage, rows = staged(native, "grouped")
    clean = stage.attend(rows)
    for place, (line, _, length) in enumerate(rows):
        slot = stage.owned[line][length // 2]
        for leaf in stage.pool.leaves():
            kept = leaf.bits()[slot].copy()
            leaf.bits()[slot] = value
            got = stage.attend(rows)
            leaf.bits()[slot] = kept
            for other, (a, b) in enumerate(zip(clean, got, strict=True)):
                if other != place:
                    np.testing.assert_array_equal(a, b)


def test_slots_outside_the_window_are_not_read(native) -> None:
    """They may belong to somebody else by now, or to nobody."""
    stage, rows = staged(native, "window")
    clean = stage.attend(rows)
    for line, q, length in rows:
        behind = max(0, length - len(q) - 300 + 1)
        for leaf in stage.pool.leaves():
            leaf.bits()[stage.owned[line][:behind]] = np.nan
        stage.pool.tables.bits()[:, line, :behind] = -(2**30)
    for a, b in zip(clean, stage.attend(rows), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_value_leaves_queries_alone_that_see_nothing_near_it(native, dtype: str) -> None:
    """Those of a tile whose window begins behind the block of keys, though others see it."""
    stage = Stage(native, layer_kv(window=16), dtype=dtype)
    stage.add(1, 100)
    rows = [(1, stage.queries(100), 100)]
    clean = stage.attend(rows)[0]
    values = stage.pool.values[0].bits()
    values[stage.owned[1][63]] = to_bits(np.array(np.inf), dtype)
    got = stage.attend(rows)[0]
    assert not np.array_equal(got[78], clean[78])
    np.testing.assert_array_equal(got[79:], clean[79:])


def test_a_sink_that_outweighs_all_scores_leaves_nothing(native) -> None:
    stage, rows = staged(native, "grouped")
    sinks = np.array([-1e30, 1e4, 0.0, -1e30, 1e4, 0.0])
    plain = stage.attend(rows)
    for with_sinks, without in zip(stage.attend(rows, sinks), plain, strict=True):
        heads = with_sinks.reshape(len(with_sinks), 6, 16)
        np.testing.assert_array_equal(heads[:, 0], without.reshape(heads.shape)[:, 0])
        assert not heads[:, 1].any()
        assert (np.abs(heads[:, 2]) < np.abs(without.reshape(heads.shape)[:, 2])).all()


def test_the_stage_spoils_what_nobody_owns(native) -> None:
    stage = Stage(native, layer_kv())
    stage.add(1, 3)
    values = from_bits(np.array(stage.pool.keys[0].bits()), "float32")
    assert np.isnan(values).any(axis=(1, 2)).sum() == stage.slots - 1 - 3
