"""``/v1/chat/completions``: OpenAI's chat API, whole and streamed.

It does not know how a template turns messages into text; the tokenizer does that.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cardan.engine.api import GenerateOutput, GenerateRequest
from cardan.errors import RequestError
from cardan.server.bodies import parse_body, read_object
from cardan.server.generation import Choice, Job, answer, check_failed, new_choices, run_job, run_to_end
from cardan.server.openai_bodies import CHAT_REFUSED, MANY_PIECES, ChatBody, count_pieces, read_messages
from cardan.server.openai_logprobs import chat_logprobs
from cardan.server.openai_usage import add_limits, finish_name, usage_object
from cardan.server.prompts import LONG_TEXT, encode_prompt
from cardan.server.replies import JsonResponse
from cardan.server.sse import open_stream
from cardan.server.state import ServerState, state_of
from cardan.types import LogprobParams


@dataclass(frozen=True, slots=True)
class _Chat:
    """One checked request.

    Attributes:
        state: of the server.
        body: of the request.
        job: what the engine is asked.
        stream_usage: whether a stream ends with a usage chunk.
    """

    state: ServerState
    body: ChatBody
    job: Job
    stream_usage: bool

    def head(self, kind: str) -> dict[str, Any]:
        """What every object of the response begins with."""
        state = self.state
        return {
            "id": self.job.request_id,
            "object": kind,
            "created": self.job.created,
            "model": state.model_name,
        }


async def chat_completions(request: Request) -> Response:
    """POST ``/v1/chat/completions``."""
    state = state_of(request)
    state.check_accepting()
    data = await read_object(request, state.config.server.max_body_bytes)
    body = parse_body(ChatBody, data, CHAT_REFUSED)
    state.check_model(body.model)
    state.check_scheduling(body.priority, body.routing_key)
    stream_usage = body.include_usage()
    chat = _Chat(state, body, await build_chat_job(state, body), stream_usage)
    if body.stream:
        return await open_stream(request, _stream(chat))
    choices = new_choices(chat.job)
    await answer(request, run_to_end(state, chat.job, choices))
    return JsonResponse(_whole(chat, choices[0]))


async def build_chat_job(state: ServerState, body: ChatBody) -> Job:
    """What a chat asks of the engine.

    Raises:
        RequestError: the conversation or a field is wrong.
    """
    if body.top_logprobs and not body.logprobs:
        raise RequestError("'top_logprobs' has no effect without \"logprobs\": true.", param="top_logprobs")
    limit, minimum = body.limit(), body.minimum()
    if count_pieces(body.messages) > MANY_PIECES:
        messages = await asyncio.to_thread(read_messages, body.messages)
    else:
        messages = read_messages(body.messages)
    prompt = await _render(state, body, messages)
    state.check_text(prompt, "messages")
    ids = await encode_prompt(state.engine.tokenizer, prompt, add_special_tokens=False)
    info = state.engine.info
    kept = min(len(ids), info.max_input_tokens)  # what is more is refused or cut
    room = max(1, min(info.context_length, info.max_total_tokens) - kept - 1)
    request_id = body.rid or f"chatcmpl-{uuid.uuid4().hex}"
    generate = GenerateRequest(
        input_ids=ids,
        sampling=body.sampling(room if limit is None else limit, minimum, info),
        logprobs=LogprobParams(output=True, top=body.top_logprobs) if body.logprobs else LogprobParams(),
        rid=request_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        routing_key=body.routing_key,
        add_special_tokens=False,
    )
    return Job(request_id, (generate,))


async def _render(state: ServerState, body: ChatBody, messages: list[dict[str, Any]]) -> str:
    turn: dict[str, Any] = {"add_generation_prompt": body.add_generation_prompt is not False}
    if body.continue_final_message:
        if messages[-1]["role"] != "assistant":
            raise RequestError(
                f"'continue_final_message' needs a last message of the assistant, got one of '{messages[-1]['role']}'.",
                param="continue_final_message",
            )
        if body.add_generation_prompt:
            raise RequestError(
                "'continue_final_message' and 'add_generation_prompt' contradict each other. Drop one.",
                param="continue_final_message",
            )
        turn = {"add_generation_prompt": False, "continue_final_message": True}
    if sum(len(message["content"]) for message in messages) > LONG_TEXT:
        return await asyncio.to_thread(_render_now, state, body, messages, turn)
    return _render_now(state, body, messages, turn)


def _render_now(state: ServerState, body: ChatBody, messages: list[dict[str, Any]], turn: dict[str, Any]) -> str:
    try:
        return state.engine.tokenizer.render_chat(messages, **turn, **body.chat_template_kwargs)
    except RecursionError:
        raise RequestError(
            "'chat_template_kwargs' is nested too deeply for the chat template.", param="chat_template_kwargs"
        ) from None


def _whole(chat: _Chat, choices: list[Choice]) -> dict[str, Any]:
    for choice in choices:
        check_failed(choice.finish_reason)
    response = chat.head("chat.completion")
    response["choices"] = [_whole_choice(chat, index, choice) for index, choice in enumerate(choices)]
    response["usage"] = usage_object(chat.state, [choices])
    add_limits(response, choices, asked_for_output=chat.body.limit() is not None)
    return response


def _whole_choice(chat: _Chat, index: int, choice: Choice) -> dict[str, Any]:
    logprobs = None
    if chat.body.logprobs:
        logprobs = chat_logprobs(choice.token_ids, choice.logprobs, chat.state.engine.tokenizer)
    return {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": logprobs,
        **finish_name(choice.finish_reason),
    }


async def _stream(chat: _Chat) -> AsyncGenerator[Any, None]:
    choices = new_choices(chat.job)[0]
    begun: set[int] = set()
    async with contextlib.aclosing(run_job(chat.state, chat.job)) as outputs:
        async for _, output in outputs:
            choices[output.index].add(output)
            check_failed(output.finish_reason)
            if output.index not in begun:
                begun.add(output.index)
                yield _chunk(chat, output.index, {"role": "assistant", "content": ""})
            if output.text or (chat.body.logprobs and output.token_ids):
                yield _chunk(chat, output.index, {"content": output.text}, output)
            if output.finish_reason is not None:
                last = _chunk(chat, output.index, {})
                last["choices"][0].update(finish_name(output.finish_reason))
                add_limits(last, [output], asked_for_output=chat.body.limit() is not None)
                yield last
    if chat.stream_usage:
        yield {**chat.head("chat.completion.chunk"), "choices": [], "usage": usage_object(chat.state, [choices])}


def _chunk(chat: _Chat, index: int, delta: dict[str, Any], news: GenerateOutput | None = None) -> dict[str, Any]:
    logprobs = None
    if news is not None and chat.body.logprobs:
        logprobs = chat_logprobs(news.token_ids, news.logprobs, chat.state.engine.tokenizer)
    chunk = chat.head("chat.completion.chunk")
    chunk["choices"] = [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}]
    if chat.stream_usage:
        chunk["usage"] = None
    return chunk
