"""Sends a workload to a target: each request at its time, no more than so many at once.

It does not know what a target is: an engine in this process, or a server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from cardan.bench.measure import RequestRecord
from cardan.bench.workload import BenchRequest
from cardan.engine.api import AsyncEngine, GenerateRequest
from cardan.errors import CardanError
from cardan.types import SamplingParams


class Target(Protocol):
    """Something that answers requests."""

    async def send(self, request: BenchRequest, record: RequestRecord) -> None:
        """Run one request and note every piece of its answer in ``record``.

        Raises:
            CardanError: the request failed.
        """


class EngineTarget:
    """An engine in this process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def send(self, request: BenchRequest, record: RequestRecord) -> None:
        """Run one request; see ``Target``."""
        sampling = SamplingParams(max_new_tokens=request.output_len, temperature=0.0, ignore_eos=True)
        wanted = GenerateRequest(input_ids=request.input_ids, sampling=sampling)
        async for output in self._engine.generate(wanted):
            record.add_chunk(time.monotonic(), len(output.token_ids))
            record.prompt_tokens = output.prompt_tokens
            record.completion_tokens = output.completion_tokens
            record.cached_tokens = output.cached_tokens


async def run_load(
    target: Target,
    workload: Sequence[BenchRequest],
    max_concurrency: int | None = None,
    on_done: Callable[[RequestRecord], None] | None = None,
) -> list[RequestRecord]:
    """Send a workload and wait for all answers.

    Args:
        target: where to.
        workload: what, in order of arrival.
        max_concurrency: most requests at once, or None for no limit. A request that waits for its turn is not yet
            sent: its times start when it is.
        on_done: called with each record as it ends.
    """
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None
    start_s = time.monotonic()

    async def run_one(request: BenchRequest) -> RequestRecord:
        await asyncio.sleep(max(0.0, start_s + request.arrival_s - time.monotonic()))
        if gate is None:
            return await _send(target, request, on_done)
        async with gate:
            return await _send(target, request, on_done)

    return list(await asyncio.gather(*(run_one(request) for request in workload)))


async def _send(
    target: Target, request: BenchRequest, on_done: Callable[[RequestRecord], None] | None
) -> RequestRecord:
    record = RequestRecord(sent_s=time.monotonic())
    try:
        await target.send(request, record)
    except CardanError as error:
        record.error = str(error)
    if on_done is not None:
        on_done(record)
    return record
