"""Several streams read as one: nothing is lost, nobody runs ahead, everything is closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from cardan.engine.merging import merge


class Source:
    """Counts up, and remembers how far it got and whether it was closed."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.given = 0
        self.closed = False
        self._count = count
        self._fails_at = fails_at

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self._count):
                if number == self._fails_at:
                    raise ValueError(f"no {number}")
                self.given += 1
                yield number
                await asyncio.sleep(0)
        finally:
            self.closed = True


@pytest.mark.parametrize("lengths", [(), (5,), (3, 0, 7)])
async def test_every_item_comes_in_its_order(lengths):
    sources = [Source(length) for length in lengths]
    taken = [[] for _ in lengths]
    async for index, item in merge([source.items() for source in sources]):
        taken[index].append(item)
    assert taken == [list(range(length)) for length in lengths]
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_sources_do_not_run_ahead_of_a_slow_reader(count):
    sources = [Source(1000) for _ in range(count)]
    async with contextlib.aclosing(merge([source.items() for source in sources])) as merged:
        for taken in range(1, 20):
            await anext(merged)
            for _ in range(50):
                await asyncio.sleep(0)
            assert sum(source.given for source in sources) <= taken + 2 * count


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_it_closes_every_source(count):
    sources = [Source(1000) for _ in range(count)]
    merged = merge([source.items() for source in sources])
    for _ in range(10):
        await anext(merged)
    await merged.aclose()
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("others", [0, 2])
async def test_an_error_of_one_source_ends_all(others):
    sources = [Source(1000, fails_at=4), *(Source(1000) for _ in range(others))]
    with pytest.raises(ValueError, match="no 4"):
        async for _ in merge([source.items() for source in sources]):
            pass
    assert all(source.closed for source in sources)
