"""The pool of the native kernels: what it holds, how its tables change, what is written to its slots."""

from __future__ import annotations

import numpy as np
import pytest

native_kernels = pytest.importorskip("cardan_native")

from native_bench import from_bits, layer_kv, tensor, to_bits, values_of  # noqa: E402

from cardan.errors import UnsupportedError  # noqa: E402
from cardan.types import KVLayout, TableDelta, TableDeltas  # noqa: E402
from cardan_cpu.native_kv_pool import NativeKVPool  # noqa: E402

VARIANTS = native_kernels.available()


def make_pool(variant: str = "portable", groups: int = 1, dtype: str = "float32") -> NativeKVPool:
    layers = tuple(layer_kv(index=i, group=i % groups, k_dim=16, v_dim=12) for i in range(2))
    return NativeKVPool(native_kernels.load(variant), KVLayout(layers=layers, page_size=1, dtype=dtype), 64, 5, 32)


def test_it_holds_zeros() -> None:
    pool = make_pool(groups=2, dtype="bfloat16")
    assert [tuple(leaf.shape) for leaf in pool.leaves()] == [(64, 2, 16)] * 2 + [(64, 2, 12)] * 2
    assert {leaf.dtype for leaf in pool.leaves()} == {"bfloat16"}
    assert pool.num_bytes == 2 * 64 * 2 * (16 + 12) * 2
    assert tuple(pool.tables.shape) == (2, 5, 32)
    assert not any(np.array(x.bits()).any() for x in (*pool.leaves(), pool.tables))


def test_leaves_are_bound_in_their_order() -> None:
    pool = make_pool()
    leaves = pool.leaves()
    pool.bind(leaves[::-1])
    assert pool.keys == [leaves[3], leaves[2]]
    assert pool.values == [leaves[1], leaves[0]]


def test_memory_is_committed_as_it_is_touched() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    layout = KVLayout(layers=(layer_kv(k_dim=64, v_dim=64),), page_size=1, dtype="float32")
    before = resident()
    pool = NativeKVPool(native_kernels.load(), layout, 1 << 20, 64, 32768)
    assert pool.num_bytes == 1 << 30
    assert resident() - before < 1 << 26


@pytest.mark.parametrize("flat", [True, False])
def test_tables_change(flat: bool) -> None:
    pool = make_pool(groups=2)
    runs = [
        TableDelta(row_id=3, start=0, slots=np.array([[5, 6, 7], [9, 8, 7]], np.int32)),
        TableDelta(row_id=1, start=31, slots=np.array([[1], [2]], np.int32)),
        TableDelta(row_id=3, start=2, slots=np.array([[60, 61], [62, 63]], np.int32)),
    ]
    changes = TableDeltas(
        rows=np.array([3, 3, 3, 1, 3, 3], np.int32),
        positions=np.array([0, 1, 2, 31, 2, 3], np.int32),
        slots=np.concatenate([run.slots for run in runs], axis=1),
    )
    pool.update_tables(changes if flat else runs)
    want = np.zeros((2, 5, 32), np.int32)
    want[0, 3, :4], want[1, 3, :4] = [5, 6, 60, 61], [9, 8, 62, 63]
    want[0, 1, 31], want[1, 1, 31] = 1, 2
    np.testing.assert_array_equal(np.array(pool.tables.bits()), want)


def test_no_changes_change_nothing() -> None:
    pool = make_pool()
    nothing = np.zeros(0, np.int32)
    pool.update_tables(())
    pool.update_tables(TableDeltas(rows=nothing, positions=nothing, slots=nothing[None]))
    assert not np.array(pool.tables.bits()).any()


@pytest.mark.parametrize(
    ("row", "start", "slot", "message"),
    [
        (5, 0, 1, "rows must be from 0 to 4, got 5"),
        (-1, 0, 1, "rows must be from 0 to 4, got -1"),
        (0, 31, 1, "positions must be from 0 to 31, got 32"),
        (0, 0, 64, "slots must be from 0 to 63, got 64"),
        (0, 0, -3, "slots must be from 0 to 63, got -3"),
    ],
)
def test_changes_outside_are_refused_whole(row: int, start: int, slot: int, message: str) -> None:
    pool = make_pool()
    with pytest.raises(ValueError, match=message):
        pool.update_tables([TableDelta(row_id=row, start=start, slots=np.array([[1, slot]], np.int32))])
    assert not np.array(pool.tables.bits()).any()


def test_changes_must_agree() -> None:
    pool = make_pool()
    two, three = np.zeros(2, np.int32), np.zeros(3, np.int32)
    with pytest.raises(ValueError, match=r"must agree for int32 \[1, 5, 32\], got 2, 3 and \[1, 2\]"):
        pool.native.write_table(pool.tables, two, three, two[None], 64)


def test_other_element_types_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"must be one of float32, .*, int8 .* got 'float64'"):
        make_pool(dtype="float64")


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_keys_and_values_go_to_their_slots(variant: str, dtype: str, kv_dtype: str) -> None:
    pool = make_pool(variant, groups=2, dtype=kv_dtype)
    native, rng = pool.native, np.random.default_rng(1)
    k, v = rng.standard_normal((7, 2, 16)), rng.standard_normal((7, 2, 12))
    slots = np.array([[0] * 7, [3, 63, -1, 1, 64, 20, 21]], np.int32)
    native.write_kv(
        tensor(native, k, dtype),
        tensor(native, v, dtype),
        pool.keys[1],
        pool.values[1],
        tensor(native, slots, "int32"),
        1,
    )
    there = np.array([0, 1, 3, 5, 6])
    for leaf, values in ((pool.keys[1], k), (pool.values[1], v)):
        want = np.zeros(tuple(leaf.shape))
        want[slots[1][there]] = from_bits(to_bits(from_bits(to_bits(values, dtype), dtype), kv_dtype), kv_dtype)[there]
        np.testing.assert_array_equal(values_of(leaf), want)
    assert not values_of(pool.keys[0]).any()


def test_keys_may_be_a_part_of_wider_rows() -> None:
    pool = make_pool()
    native = pool.native
    wide = tensor(native, np.arange(3 * 90, dtype=np.float32).reshape(3, 90))
    k, v = wide.columns(10, 32).split_heads(2), wide.columns(42, 24).split_heads(2)
    native.write_kv(k, v, pool.keys[0], pool.values[0], tensor(native, np.array([[4, 5, 9]]), "int32"), 0)
    np.testing.assert_array_equal(values_of(pool.keys[0])[5].reshape(-1), np.arange(100, 132))
    np.testing.assert_array_equal(values_of(pool.values[0])[9].reshape(-1), np.arange(222, 246))


def test_what_does_not_fit_is_refused() -> None:
    pool = make_pool()
    native = pool.native
    k, v = tensor(native, np.zeros((3, 2, 16))), tensor(native, np.zeros((3, 2, 12)))
    slots = tensor(native, np.zeros((1, 3)), "int32")
    for pattern, arguments in {
        r"write_kv: k must be \[3, 2, 16\], got float32 \[3, 2, 12\]": (v, v, pool.keys[0], pool.values[0], slots, 0),
        "write_kv: v must be float32": (
            k,
            tensor(native, np.zeros((3, 2, 12)), "float16"),
            *pool.leaves()[1:3],
            slots,
            0,
        ),
        r"write_kv: out_slots must be \[1, 3\]": (
            *(k, v, pool.keys[0], pool.values[0]),
            *(tensor(native, np.zeros((1, 2)), "int32"), 0),
        ),
        "write_kv: group must be below 1, got 1": (k, v, pool.keys[0], pool.values[0], slots, 1),
    }.items():
        with pytest.raises(ValueError, match=pattern):
            native.write_kv(*arguments)
