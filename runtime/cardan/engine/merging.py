"""Reads several streams as one, no faster than its reader does.

It does not know what the streams hold.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all sources as they come, each with the index of its source. Closing it closes every source.

    About one item of each source waits here; while the reader is slow, the sources are not asked for more.

    Raises:
        Exception: the first that a source raises; the other sources are closed.
    """
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    waiting: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=len(sources))

    async def pump(index: int, source: AsyncGenerator[T, None]) -> None:
        try:
            async with contextlib.aclosing(source) as items:
                async for item in items:
                    await waiting.put((index, item))
            await waiting.put(None)
        except Exception as error:  # noqa: BLE001 - handed to the reader, which raises it
            await waiting.put(error)

    tasks = [asyncio.create_task(pump(index, source)) for index, source in enumerate(sources)]
    try:
        num_open = len(tasks)
        while num_open:
            entry = await waiting.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                num_open -= 1
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
