"""``/v1/completions``: OpenAI's text API, whole and streamed, with echo and prompt logprobs.

It does not know how the engine runs a request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cardan.engine.api import GenerateOutput, GenerateRequest
from cardan.engine.logit_processors import read_processor
from cardan.errors import RequestError
from cardan.server.chats.unenforced import name_unenforced
from cardan.server.generation import Choice, Job, admitted, check_failed, new_choices, run_job, run_to_end
from cardan.server.http.bodies import parse_body, read_object
from cardan.server.http.disconnects import while_connected
from cardan.server.http.replies import JsonResponse
from cardan.server.http.sse import open_stream
from cardan.server.openai.bodies import COMPLETION_REFUSED, CompletionBody, StreamOptions
from cardan.server.openai.hidden import shown_state
from cardan.server.openai.logprobs import OffsetTracker, completion_logprobs
from cardan.server.openai.usage import add_limits, finish_name, usage_object
from cardan.server.prompts import MAX_PROMPTS, check_prompt_ids, check_total_choices
from cardan.server.state import ServerState, state_of
from cardan.types import FinishKind, FinishReason, LogprobParams, SamplingParams

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Completion:
    """One checked request.

    Attributes:
        state: of the server.
        body: of the request.
        job: what the engine is asked.
        echoed: text of each prompt that the answer repeats; empty without ``echo``.
        options: where a stream tells usage.
    """

    state: ServerState
    body: CompletionBody
    job: Job
    echoed: tuple[str, ...]
    options: StreamOptions

    @property
    def echo_only(self) -> bool:
        """Whether only the prompt is wanted; the engine then makes one token, which is dropped."""
        return self.body.max_tokens == 0

    def head(self) -> dict[str, Any]:
        """What every object of the response begins with."""
        state = self.state
        return {
            "id": self.job.request_id,
            "object": "text_completion",
            "created": self.job.created,
            "model": state.model_name,
        }


async def completions(request: Request) -> Response:
    """POST ``/v1/completions``."""
    state = state_of(request)
    state.check_accepting()
    data = await read_object(request, state.config.server.max_body_bytes)
    body = parse_body(CompletionBody, data, COMPLETION_REFUSED)
    state.check_model(body.model)
    state.check_scheduling(body.priority, body.routing_key)
    state.check_ids_length(body.prompt, "prompt")
    prompts = _read_prompts(state, body.prompt)
    options = body.usage_in_stream()
    job, echoed = _build_job(state, body, prompts), _echoed(state, body, prompts)
    with admitted(state, job) as live_job:
        return await _respond(request, _Completion(state, body, live_job, echoed, options))


async def _respond(request: Request, completion: _Completion) -> Response:
    state = completion.state
    if completion.body.stream:
        return name_unenforced(await open_stream(request, _stream(completion)), state, completion.job)
    choices = new_choices(completion.job)
    await while_connected(request, run_to_end(state, completion.job, choices))
    return name_unenforced(JsonResponse(_whole(completion, choices)), state, completion.job)


def _read_prompts(state: ServerState, value: object) -> list[Prompt]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise RequestError(
            "'prompt' must be a string, a list of strings, a list of token ids or a list of such lists, and not empty.",
            param="prompt",
        )
    if isinstance(value[0], str | list) and len(value) > MAX_PROMPTS:
        raise RequestError(f"'prompt' may hold at most {MAX_PROMPTS} prompts, got {len(value)}.", param="prompt")
    if isinstance(value[0], str) and all(isinstance(item, str) for item in value):
        return list(value)
    info = state.engine.info
    prompts = value if isinstance(value[0], list) and all(isinstance(item, list) for item in value) else [value]
    return [check_prompt_ids(ids, info.vocab_size, "prompt", info.max_input_tokens) for ids in prompts]


def _build_job(state: ServerState, body: CompletionBody, prompts: list[Prompt]) -> Job:
    if body.best_of is not None and body.best_of != body.n:
        raise RequestError(
            f"'best_of' is {body.best_of} and 'n' is {body.n}; choices are not ranked. Send 'n' alone.",
            param="best_of",
            code="unsupported_parameter",
        )
    check_total_choices(len(prompts), len(prompts) * body.n)
    for prompt in prompts:
        state.check_text(prompt if isinstance(prompt, str) else "", "prompt")
    sampling = _sampling(state, body)
    logprobs = LogprobParams()
    if body.logprobs is not None:
        logprobs = LogprobParams(output=True, prompt_start=0 if body.echo else None, top=body.logprobs)
    request_id = body.rid or f"cmpl-{uuid.uuid4().hex}"
    rids = [request_id] if len(prompts) == 1 else [f"{request_id}-{i}" for i in range(len(prompts))]
    requests = tuple(
        GenerateRequest(
            text=prompt if isinstance(prompt, str) else None,
            input_ids=None if isinstance(prompt, str) else prompt,
            sampling=sampling,
            logprobs=logprobs,
            rid=rid,
            priority=body.priority,
            cache_salt=body.cache_salt,
            routing_key=body.routing_key,
            hidden_states=body.return_hidden_states,
            processor=read_processor(body.custom_logit_processor),
        )
        for prompt, rid in zip(prompts, rids, strict=True)
    )
    return Job(request_id, requests)


def _sampling(state: ServerState, body: CompletionBody) -> SamplingParams:
    limit = body.max_tokens
    if limit == 0 and not body.echo:
        raise RequestError(
            "'max_tokens' must be at least 1, got 0. Only with \"echo\": true may the output be empty.",
            param="max_tokens",
            code="invalid_value",
        )
    sampling = body.sampling(limit, body.minimum(), state.engine.info)
    return dataclasses.replace(sampling, max_new_tokens=max(1, limit))


def _echoed(state: ServerState, body: CompletionBody, prompts: list[Prompt]) -> tuple[str, ...]:
    if not body.echo:
        return ("",) * len(prompts)
    decode, most_tokens = state.engine.tokenizer.decode, state.engine.info.max_input_tokens
    return tuple(
        prompt if isinstance(prompt, str) else decode(prompt[:most_tokens], skip_special_tokens=False)
        for prompt in prompts
    )


def _whole(completion: _Completion, prompts: list[list[Choice]]) -> dict[str, Any]:
    flat = [(index, choice) for index, choices in enumerate(prompts) for choice in choices]
    for _, choice in flat:
        check_failed(choice.finish_reason)
        if completion.echo_only:
            _drop_output(choice)
    response = completion.head()
    response["choices"] = [
        _whole_choice(completion, number, index, choice) for number, (index, choice) in enumerate(flat)
    ]
    response["usage"] = usage_object(completion.state, prompts)
    add_limits(response, [choice for _, choice in flat])
    return response


def _drop_output(choice: Choice) -> None:
    choice.text = ""
    choice.token_ids, choice.logprobs = [], []
    choice.completion_tokens = 0
    choice.finish_reason = _echo_end(choice.finish_reason)


def _echo_end(reason: FinishReason | None) -> FinishReason | None:
    """How a choice ends of which only the prompt is wanted: as asked for, unless somebody aborted it."""
    if reason is None or reason.kind is FinishKind.ABORT:
        return reason
    return FinishReason(FinishKind.LENGTH, length=0)


def _whole_choice(completion: _Completion, number: int, index: int, choice: Choice) -> dict[str, Any]:
    text = completion.echoed[index] + choice.text
    body, logprobs = completion.body, None
    if body.logprobs is not None:
        logprobs = completion_logprobs(
            [*choice.prompt_token_ids, *choice.token_ids],
            [*choice.prompt_logprobs, *choice.logprobs],
            completion.state.engine.tokenizer,
            OffsetTracker(0, text),
            body.logprobs,
        )
    whole = {"text": text, "index": number, "logprobs": logprobs, **finish_name(choice.finish_reason)}
    return whole | shown_state(body, choice.hidden_state)


async def _stream(completion: _Completion) -> AsyncGenerator[Any, None]:
    prompts = new_choices(completion.job)
    count = completion.body.n
    trackers: dict[int, OffsetTracker] = {}
    async with contextlib.aclosing(run_job(completion.state, completion.job)) as outputs:
        async for index, output in outputs:
            choice = prompts[index][output.index]
            choice.add(output)
            check_failed(output.finish_reason)
            number = index * count + output.index
            begins = number not in trackers
            tracker = trackers.setdefault(number, OffsetTracker())
            news = _News(output, completion.echoed[index] if begins else "", begins)
            if completion.echo_only:
                _drop_output(choice)
                news = news.without_output()
            if begins or news.output.text or news.output.token_ids or news.output.finish_reason:
                chunk = _chunk(completion, number, news, tracker)
                if output.finish_reason is not None:
                    chunk["choices"][0].update(shown_state(completion.body, choice.hidden_state))
                if completion.options.include_usage:
                    continuous = completion.options.continuous_usage_stats
                    chunk["usage"] = usage_object(completion.state, prompts) if continuous else None
                yield chunk
    if completion.options.include_usage:
        usage = usage_object(completion.state, prompts)
        yield {**completion.head(), "choices": [], "usage": usage}


@dataclass(frozen=True, slots=True)
class _News:
    """One output of a choice on its way into a chunk.

    Attributes:
        output: from the engine.
        echoed: text of the prompt, where this is the first output of an echoing choice.
        begins: whether this is the choice's first output.
    """

    output: GenerateOutput
    echoed: str
    begins: bool

    def without_output(self) -> _News:
        """The same, with only the prompt left."""
        finish = _echo_end(self.output.finish_reason)
        output = msgspec.structs.replace(self.output, text="", token_ids=(), logprobs=(), finish_reason=finish)
        return dataclasses.replace(self, output=output)


def _chunk(completion: _Completion, number: int, news: _News, tracker: OffsetTracker) -> dict[str, Any]:
    output, body, logprobs = news.output, completion.body, None
    if body.logprobs is not None:
        logprobs = completion_logprobs(
            [*output.prompt_token_ids, *output.token_ids],
            [*output.prompt_logprobs, *output.logprobs],
            completion.state.engine.tokenizer,
            tracker,
            body.logprobs,
        )
    choice = {"text": news.echoed + output.text, "index": number, "logprobs": logprobs}
    chunk = completion.head()
    chunk["choices"] = [choice | finish_name(output.finish_reason)]
    if output.finish_reason is not None:
        add_limits(chunk, [output])
    return chunk
