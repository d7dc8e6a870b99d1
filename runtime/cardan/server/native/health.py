"""``/health``, ``/ready``, ``/health_generate`` and ``/metrics``: how the server is.

It knows no API of models.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from cardan.engine.api import EngineStats, GenerateRequest
from cardan.errors import EngineBusyError, EngineDeadError
from cardan.server.generation import Job, check_complete, run_job
from cardan.server.http.disconnects import while_connected
from cardan.server.http.replies import JsonResponse
from cardan.server.state import ServerState, state_of
from cardan.types import Pooling, SamplingParams

PROBE_TIMEOUT_S = 20.0
METRICS_WAIT_S = 5.0
"""How long `/metrics` waits for the engine's part. Scrapers give up after 10 s, and then they have nothing at all."""


async def health(request: Request) -> Response:
    """Whether the process and the engine live. It generates nothing and asks the engine nothing."""
    if state_of(request).engine.alive:
        return JsonResponse({"status": "ok"})
    return JsonResponse({"status": "engine dead"}, status_code=503)


async def ready(request: Request) -> Response:
    """Whether new requests are taken."""
    state = state_of(request)
    if not state.engine.alive:
        return JsonResponse({"status": "engine dead"}, status_code=503)
    if state.draining:
        return JsonResponse({"status": "shutting down"}, status_code=503)
    return JsonResponse({"status": "ok"})


async def health_generate(request: Request) -> Response:
    """Generate one token. A busy engine that makes progress is healthy, even when the probe times out."""
    state = state_of(request)
    state.check_accepting()
    timeout_s = request.app.state.probe_timeout_s
    before = await _generated_tokens(state, timeout_s)
    if before is None:
        return JsonResponse({"status": "no answer in time"}, status_code=503)
    try:
        async with asyncio.timeout(timeout_s):
            await while_connected(request, _probe(state))
    except TimeoutError:
        after = await _generated_tokens(state, timeout_s)
        if after is not None and after > before:
            return JsonResponse({"status": "busy", "generated_tokens": after - before})
        return JsonResponse({"status": "no token in time"}, status_code=503)
    return JsonResponse({"status": "ok"})


async def _generated_tokens(state: ServerState, timeout_s: float) -> int | None:
    """Tokens that the engine has generated so far, or None when it does not even answer that."""
    stats = await _stats_in_time(state, timeout_s)
    return None if stats is None else stats.totals.get("generated_tokens", 0)


async def _stats_in_time(state: ServerState, timeout_s: float) -> EngineStats | None:
    try:
        async with asyncio.timeout(timeout_s):
            return await state.engine.stats()
    except (TimeoutError, EngineBusyError):
        return None


async def _probe(state: ServerState) -> None:
    rid = f"health-{uuid.uuid4().hex}"
    token = state.engine.tokenizer.bos_id or 0
    embeds = state.config.model.is_embedding
    sampling = SamplingParams(max_new_tokens=0 if embeds else 1, temperature=0.0)
    job = Job(
        rid,
        (GenerateRequest(input_ids=(token,), sampling=sampling, rid=rid, pooling=Pooling.LAST if embeds else None),),
    )
    async with contextlib.aclosing(run_job(state, job)) as outputs:
        async for _, output in outputs:
            check_complete(output.finish_reason)


async def metrics(request: Request) -> Response:
    """Prometheus' text format. While the engine does not answer, what this process knows on its own."""
    state = state_of(request)
    if not state.engine.alive:
        raise EngineDeadError("A process of the engine ended; there are no metrics any more.")
    stats = await _stats_in_time(state, request.app.state.metrics_wait_s)
    return Response(state.metrics.render(stats), media_type=CONTENT_TYPE_LATEST)
