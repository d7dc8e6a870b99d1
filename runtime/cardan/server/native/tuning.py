"""What an owner asks of a running server: its load, its log, and to leave its long-lived objects alone.

It knows no generation.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cardan.engine.profiling import MAX_STEPS
from cardan.errors import ConfigError, RequestError
from cardan.server.http.bodies import Body, Refusal, decode_object, is_one_of, parse_body, read_body, read_object
from cardan.server.http.replies import JsonResponse
from cardan.server.state import state_of


async def loads(request: Request) -> Response:
    """GET ``/v1/loads``: what each engine behind this server has to do; there is one."""
    state = state_of(request)
    stats = await state.engine.stats()
    total = stats.max_total_tokens
    load = {
        "worker": 0,
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_queued,
        "num_used_tokens": stats.used_tokens,
        "num_cached_tokens": stats.cached_tokens,
        "max_total_num_tokens": total,
        "token_usage": stats.used_tokens / total if total else 0.0,
        "gen_throughput": stats.gen_throughput,
    }
    return JsonResponse({"loads": [load], "open_requests": state.num_open})


async def freeze_gc(_request: Request) -> Response:
    """POST ``/freeze_gc``: have the garbage collector pass over what lives by now.

    The engine's processes do so by themselves when they are ready; a server does better after its first requests.
    """
    gc.collect()
    gc.freeze()
    return JsonResponse({"success": True, "frozen_objects": gc.get_freeze_count()})


class LoggingBody(Body):
    """Body of ``/configure_logging``; what is left out stays."""

    log_level: Literal["debug", "info", "warning", "error"] | None = None
    log_requests: bool | None = None
    log_request_contents: bool | None = None


async def configure_logging(request: Request) -> Response:
    """POST ``/configure_logging``: what the server's process logs from now on."""
    state = state_of(request)
    body = parse_body(LoggingBody, await read_object(request, state.config.server.max_body_bytes))
    changes = body.model_dump(exclude_none=True)
    if not changes:
        raise RequestError(f"Send at least one of {', '.join(LoggingBody.model_fields)}.", param="log_level")
    server = dataclasses.replace(state.config.server, **changes)
    try:
        state.config = dataclasses.replace(state.config, server=server)
    except ConfigError as error:
        raise RequestError(
            f"The server's settings would not fit each other: {error} Each flag is a field of this body, in which "
            "'_' stands for '-'; send both.",
            param=next(iter(changes)),
        ) from error
    state.watch = request.app.state.observers.makers(server, state.engine)
    if body.log_level is not None:
        logging.getLogger("cardan").setLevel(body.log_level.upper())
    return JsonResponse({"success": True, **{name: getattr(server, name) for name in LoggingBody.model_fields}})


_FOLDER = Refusal("profiles are written into the folder that --profile-folder names.")
_STEPS = Refusal(
    "a profile has the steps of the scheduler, in one file; send 'num_steps' or nothing.", is_one_of(None, False, [])
)

PROFILE_REFUSED: Mapping[str, Refusal] = {
    "output_dir": _FOLDER,
    "profile_prefix": _FOLDER,
    **dict.fromkeys(
        ("start_step", "activities", "profile_by_stage", "with_stack", "record_shapes", "merge_profiles"), _STEPS
    ),
}


class ProfileBody(Body):
    """Body of ``/start_profile``; without a number of steps it goes on until ``/stop_profile``."""

    num_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] | None = None


async def start_profile(request: Request) -> Response:
    """POST ``/start_profile``: record what the scheduler's steps do from now on."""
    state = state_of(request)
    data = await read_body(request, state.config.server.max_body_bytes)
    body = parse_body(ProfileBody, decode_object(data or b"{}"), PROFILE_REFUSED)
    await state.engine.start_profile(body.num_steps)
    return JsonResponse({"success": True, "folder": state.config.server.profile_folder, "num_steps": body.num_steps})


async def stop_profile(request: Request) -> Response:
    """POST ``/stop_profile``: end the recording and write it."""
    return JsonResponse({"success": True, "file": await state_of(request).engine.stop_profile()})
