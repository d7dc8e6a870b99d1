"""What the page is made of: its three files, and what its live view asks for every second.

It knows nothing of how the page looks.
"""

from __future__ import annotations

import asyncio
import time
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from cardan.errors import EngineBusyError, EngineDeadError
from cardan.server.http.replies import JsonResponse
from cardan.server.state import state_of

FILES = {
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/ask.js": ("ask.js", "text/javascript"),
    "/page/live.js": ("live.js", "text/javascript"),
}
"""Paths of the page's parts: the file, and its media type."""

STATS_WAIT_S = 2.0

_HEADERS = {
    # Nothing from elsewhere, and in no frame of another page.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _file(name: str, media_type: str) -> Response:
    content = files("cardan.server.page").joinpath(name).read_bytes()
    return Response(content, media_type=media_type, headers=_HEADERS)


async def root(request: Request) -> Response:
    """GET ``/``: the page for a browser; for anything else the words that Ollama's clients look for."""
    if "text/html" in request.headers.get("accept", ""):
        return _file("index.html", "text/html")
    return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})


async def part(request: Request) -> Response:
    """GET a file of the page."""
    return _file(*FILES[request.scope["path"]])


async def live(request: Request) -> Response:
    """GET ``/page/live``: gauges, totals, latencies and the last requests, as of now."""
    state = state_of(request)
    info = state.engine.info
    answer: dict[str, Any] = {
        "model": info.model_name,
        "version": info.version,
        "uptime_s": time.time() - state.created,
        "alive": state.engine.alive,
        "draining": state.draining,
        "open_requests": state.num_open,
        "has_chat_template": state.engine.tokenizer.has_chat_template,
        "stats": None,
        "latencies": state.metrics.latencies(),
        "recent": state.recent.newest_first(),
    }
    try:
        async with asyncio.timeout(STATS_WAIT_S):
            stats = await state.engine.stats()
    except (TimeoutError, EngineBusyError, EngineDeadError):
        return JsonResponse(answer)  # the rest is worth showing while a step takes long
    answer["stats"] = {
        "num_running": stats.num_running,
        "num_queued": stats.num_queued,
        "num_grammar_queued": stats.num_grammar_queued,
        "used_tokens": stats.used_tokens,
        "cached_tokens": stats.cached_tokens,
        "max_total_tokens": stats.max_total_tokens,
        "gen_throughput": stats.gen_throughput,
        "totals": dict(stats.totals),
    }
    return JsonResponse(answer)
