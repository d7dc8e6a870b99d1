"""``/generate``: the field's native API, single prompts and lists, whole and streamed.

It does not know how a call is taken apart nor how results look; the offline ``Engine`` shares both with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from cardan.engine.input_embeds import are_many_embeds
from cardan.engine.native import NativeOutput
from cardan.engine.native_request import NativeCall, NativeOptions, native_call
from cardan.errors import RequestError
from cardan.server.chats.unenforced import name_unenforced
from cardan.server.generation import Job, admitted, check_failed, run_job, run_to_end
from cardan.server.http.bodies import Body, Refusal, drop_refused, is_anything, is_one_of, parse_body, read_object
from cardan.server.http.disconnects import while_connected
from cardan.server.http.replies import JsonResponse
from cardan.server.http.sse import open_stream
from cardan.server.prompts import MAX_PROMPTS, check_total_choices
from cardan.server.state import ServerState, state_of

_TEXT_ONLY = Refusal("only text is taken; put the prompt into 'text' or 'input_ids'.", is_one_of([]))
_SESSIONS = Refusal("sessions are not available; send the whole prompt, its cached prefix is reused.")

REFUSED: Mapping[str, Refusal] = {
    "image_data": _TEXT_ONLY,
    "audio_data": _TEXT_ONLY,
    "video_data": _TEXT_ONLY,
    "modalities": _TEXT_ONLY,
    "lora_path": Refusal("adapters are not available; the base model answers when the field is left out."),
    "session_params": _SESSIONS,
    "session_id": Refusal("sessions hold nothing here.", is_anything),
    "return_routed_experts": Refusal("expert routing cannot be returned.", is_one_of(False)),
    # Routers write these into every body that they pass on, whether the client sent them or not.
    "log_metrics": Refusal("every request is counted; only true is accepted.", is_one_of(True)),
    "no_logs": Refusal("what is logged is the server's to say (--log-requests).", is_one_of(False)),
    "background": Refusal("answers do not wait here; send the request when you want it.", is_one_of(False)),
    "return_bytes": Refusal("answers are JSON.", is_one_of(False)),
    "return_entropy": Refusal("entropies cannot be returned; logprobs can.", is_one_of(False)),
}

NO_MODEL = "unknown"
"""What a router names where its client named no model."""

SAMPLING_REFUSED: Mapping[str, Refusal] = {
    "custom_params": Refusal("give a logit processor's parameters in 'custom_logit_processor.params'."),
    "spaces_between_special_tokens": Refusal(
        "text is joined as the tokenizer defines it; only true is accepted.", is_one_of(True)
    ),
}


class GenerateBody(Body):
    """Body of ``/generate``. Fields typed ``Any`` take one value, or a list with one value a prompt."""

    model: str | None = None
    text: Any = None
    input_ids: Any = None
    input_embeds: Any = None
    sampling_params: Any = None
    rid: Any = None
    stream: bool = False
    return_logprob: Any = None
    logprob_start_len: Any = None
    top_logprobs_num: Any = None
    token_ids_logprob: Any = None
    return_text_in_logprobs: bool = False
    return_hidden_states: Any = None
    custom_logit_processor: Any = None
    priority: Any = None
    cache_salt: Any = None
    routing_key: Any = None


@dataclass(frozen=True, slots=True)
class _Native:
    """One checked request: the job, what collects its results (by prompt and choice), and their form."""

    job: Job
    results: list[list[NativeOutput]]
    as_list: bool


async def generate(request: Request) -> Response:
    """POST ``/generate``."""
    state = state_of(request)
    state.check_accepting()
    data = await read_object(request, state.config.server.max_body_bytes)
    body = parse_body(GenerateBody, data, REFUSED)
    native = _build(state, body)
    with admitted(state, native.job) as job:
        return await _respond(request, dataclasses.replace(native, job=job), body.stream)


async def _respond(request: Request, native: _Native, stream: bool) -> Response:
    state = state_of(request)
    if stream:
        return name_unenforced(await open_stream(request, _stream(state, native)), state, native.job)
    await while_connected(request, run_to_end(state, native.job, native.results))
    flat = [result.as_dict() for of_prompt in native.results for result in of_prompt]
    if native.as_list:
        return name_unenforced(JsonResponse(flat), state, native.job)
    _check_single(native)
    return name_unenforced(JsonResponse(flat[0]), state, native.job)


def _check_single(native: _Native) -> None:
    """A failed prompt among others is told in its ``finish_reason``; a single one as an HTTP error."""
    check_failed(native.results[0][0].finish_reason)


async def _stream(state: ServerState, native: _Native) -> AsyncGenerator[Any, None]:
    first_index = list(itertools.accumulate((prompt.sampling.n for prompt in native.job.requests), initial=0))
    async with contextlib.aclosing(run_job(state, native.job)) as outputs:
        async for index, output in outputs:
            result = native.results[index][output.index]
            result.add(output)
            event = result.as_dict()
            if native.as_list:
                event["index"] = first_index[index] + output.index
            else:
                _check_single(native)
            yield event


def _build(state: ServerState, body: GenerateBody) -> _Native:
    state.check_model(None if body.model == NO_MODEL else body.model)
    _check_count(body)
    state.check_ids_length(body.input_ids, "input_ids")
    options = cast(
        "NativeOptions",
        {
            name: getattr(body, name)
            for name in GenerateBody.model_fields
            if name not in ("model", "text", "sampling_params", "stream", "rid")
        },
    )
    call = native_call(body.text, _read_sampling(body.sampling_params), options, state.engine.info.sampling_defaults)
    check_total_choices(len(call.requests), sum(one.sampling.n for one in call.requests))
    for one in call.requests:
        state.check_scheduling(one.priority, one.routing_key)
        state.check_text(one.text or "", "text")
    job = _with_ids(call, body.rid)
    decode = state.engine.tokenizer.token_text if call.text_in_logprobs else None
    results = [[NativeOutput(item.logprobs, decode) for _ in range(item.sampling.n)] for item in job.requests]
    return _Native(job, results, call.many)


def _check_count(body: GenerateBody) -> None:
    for param, value in (("text", body.text), ("input_ids", body.input_ids)):
        nested = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
        _check_prompts(param, len(value) if nested else 1)
    _check_prompts("input_embeds", len(body.input_embeds) if are_many_embeds(body.input_embeds) else 1)


def _check_prompts(param: str, count: int) -> None:
    if count > MAX_PROMPTS:
        raise RequestError(f"'{param}' may hold at most {MAX_PROMPTS} prompts, got {count}.", param=param)


def _read_sampling(value: object) -> Any:
    """Refuse what is not supported by name; ``sampling_seed`` is the field's name of ``seed``."""
    if isinstance(value, list):
        return [_read_sampling(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = drop_refused(value, SAMPLING_REFUSED, "sampling_params.")
    seed = kept.pop("sampling_seed", None)
    if seed is not None:
        if kept.get("seed") is not None:
            raise RequestError("'seed' and 'sampling_seed' mean the same. Send one.", param="sampling_params.seed")
        kept["seed"] = seed
    return kept


def _with_ids(call: NativeCall, rid: object) -> Job:
    """Give each prompt an id; one id for a list of prompts stands for all of them."""
    ids = _read_ids(rid, len(call.requests), call.batched)
    requests = tuple(dataclasses.replace(one, rid=one_id) for one, one_id in zip(call.requests, ids, strict=True))
    return Job(rid if isinstance(rid, str) else ids[0], requests)


def _read_ids(rid: object, count: int, batched: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str) and rid:
        return [f"{rid}-{i}" for i in range(count)] if batched else [rid]
    if not isinstance(rid, list) or not batched or not all(isinstance(item, str) and item for item in rid):
        raise RequestError("'rid' must be a string, or for a list of prompts a list with one a prompt.", param="rid")
    if len(rid) != count:
        raise RequestError(f"'rid' has {len(rid)} entries for {count} prompts. Send one a prompt.", param="rid")
    if len(set(rid)) != count:
        raise RequestError("'rid' holds the same id twice. Ids of open requests must differ.", param="rid")
    return rid
