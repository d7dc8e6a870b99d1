"""Changes of tables: flat and as runs they are the same, and following them costs each entry once."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from cardan.types import KVLayout, LayerKV, TableDelta, TableDeltas

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS = 512
LAYOUT = KVLayout(
    layers=tuple(LayerKV(index=i, group=i, q_heads=1, kv_heads=1, k_dim=2, v_dim=2, scale=1.0) for i in range(2)),
    page_size=1,
    dtype="float32",
)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def decode_step() -> TableDeltas:
    """One new token for each of many rows."""
    return TableDeltas(
        rows=np.arange(ROWS, dtype=np.int32),
        positions=np.arange(ROWS, dtype=np.int32) % 8,
        slots=np.stack((np.arange(ROWS, dtype=np.int32) + 1, np.arange(ROWS, dtype=np.int32) + 9)),
    )


def test_whoever_follows_the_runs_finds_them_once(monkeypatch):
    calls = []
    bounds = TableDeltas._run_bounds
    monkeypatch.setattr(TableDeltas, "_run_bounds", lambda self: calls.append(1) or bounds(self))
    followed = [(delta.row_id, delta.start, delta.slots[:, 0].tolist()) for delta in decode_step()]
    assert followed == [(row, row % 8, [row + 1, row + 9]) for row in range(ROWS)]
    assert len(calls) == 1


def test_runs_can_be_chosen_and_turned_around():
    deltas = TableDeltas(rows=ints(1, 1, 2, 1), positions=ints(4, 5, 0, 9), slots=np.array([[7, 8, 9, 3]], np.int32))
    assert [delta.start for delta in reversed(deltas)] == [9, 0, 4]
    assert [delta.start for delta in deltas[1:]] == [0, 9]
    assert deltas[-1].row_id == 1


def test_single_changes_become_flat_ones():
    runs = (
        TableDelta(row_id=3, start=5, slots=np.array([[1, 2], [3, 4]], np.int32)),
        TableDelta(row_id=0, start=0, slots=np.array([[9], [8]], np.int32)),
    )
    flat = TableDeltas.of(runs)
    assert (flat.rows.tolist(), flat.positions.tolist()) == ([3, 3, 0], [5, 6, 0])
    assert flat.slots.tolist() == [[1, 2, 9], [3, 4, 8]]
    assert {array.dtype for array in (flat.rows, flat.positions, flat.slots)} == {np.dtype(np.int32)}
    assert TableDeltas.of(flat) is flat
    assert len(TableDeltas.of(())) == 0


@pytest.mark.parametrize("vendor", ["acme", "beacon"])
def test_the_examples_apply_all_changes_at_once(vendor, monkeypatch):
    """The flat arrays as they are: no object is made for a row."""
    folder = {"acme": "vendor_platform", "beacon": "vendor_device"}[vendor]
    monkeypatch.syspath_prepend(str(EXAMPLES / folder))

    if vendor == "acme":
        from acme_cardan.device import AcmePool as Pool
    else:
        from beacon_cardan.device import BeaconPool as Pool
    flat, single, empty = (Pool(LAYOUT, 2 * ROWS, ROWS, 8) for _ in range(3))
    update = "update_tables" if vendor == "acme" else "update"
    getattr(single, update)(tuple(decode_step()))
    getattr(empty, update)(())
    monkeypatch.setattr(TableDeltas, "_run_bounds", lambda self: pytest.fail("the runs were worked out"))
    getattr(flat, update)(decode_step())
    tables = [pool.tables[0] if vendor == "acme" else pool.table for pool in (flat, single, empty)]
    assert (tables[0] == tables[1]).all()
    assert tables[0][511, 7] == 512
    assert not tables[2].any()
    for name in [name for name in sys.modules if name.startswith(f"{vendor}_cardan")]:
        sys.modules.pop(name)
