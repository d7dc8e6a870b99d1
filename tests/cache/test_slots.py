from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardan.cache import RowTable, SlotAllocator
from cardan.errors import ConfigError


def test_page_zero_is_never_handed_out_and_every_other_page_once() -> None:
    slots = SlotAllocator(num_slots=12, page_size=4)
    pages = slots.allocate_pages(3)
    assert sorted(pages.tolist()) == [1, 2, 3]
    assert slots.num_free_pages == slots.num_free_tokens == 0


def test_a_run_fills_whole_pages_in_order() -> None:
    run = SlotAllocator(num_slots=32, page_size=8).allocate_run(11)
    assert run.dtype == np.int32
    assert (run % 8).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2]
    assert len(set((run // 8).tolist())) == 2


def test_freeing_a_run_gives_its_partial_last_page_back_whole() -> None:
    slots = SlotAllocator(num_slots=32, page_size=8)
    slots.free(slots.allocate_run(11))
    assert slots.num_free_tokens == 32
    assert sorted(slots.free_pages().tolist()) == [1, 2, 3, 4]


def test_taking_more_than_there_is_and_freeing_twice_are_bugs() -> None:
    slots = SlotAllocator(num_slots=4, page_size=2)
    run = slots.allocate_run(4)
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free"):
        slots.allocate_pages(1)
    slots.free(run)
    with pytest.raises(AssertionError, match="given back twice"):
        slots.free(run)


@pytest.mark.parametrize(("num_slots", "page_size"), [(10, 4), (0, 1), (3, 4), (4, 0)])
def test_a_pool_that_is_not_whole_pages_is_refused(num_slots: int, page_size: int) -> None:
    with pytest.raises(ConfigError, match=r"whole number of pages.*--max-total-tokens or --page-size"):
        SlotAllocator(num_slots, page_size)


@given(st.sampled_from([1, 4, 16]), st.lists(st.integers(1, 40), max_size=30), st.randoms())
def test_no_page_is_ever_lost_or_held_twice(page_size: int, lengths: list[int], rng: object) -> None:
    slots = SlotAllocator(num_slots=16 * page_size, page_size=page_size)
    held: list[np.ndarray] = []
    for length in lengths:
        if -(-length // page_size) <= slots.num_free_pages:
            held.append(slots.allocate_run(length))
        elif held:
            slots.free(held.pop(rng.randrange(len(held))))  # type: ignore[attr-defined]
        pages = [slots.free_pages(), *(run[::page_size] // page_size for run in held)]
        assert sorted(np.concatenate(pages).tolist()) == list(range(1, 17))


def test_rows_come_and_go_and_row_zero_is_padding() -> None:
    table = RowTable(num_rows=4, max_length=5)
    rows = [table.take() for _ in range(3)]
    assert sorted(rows) == [1, 2, 3]
    assert table.num_free == 0
    table.give_back(2)
    assert table.free_rows() == (2,)
    assert table.take() == 2
    assert table.slots.shape == (4, 5)
    assert table.slots.dtype == np.int32
    with pytest.raises(AssertionError, match="row 0"):
        table.give_back(0)
