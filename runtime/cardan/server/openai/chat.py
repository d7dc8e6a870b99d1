"""``/v1/chat/completions``: OpenAI's chat API, whole and streamed.

It does not know how a template turns messages into text, nor how a model writes calls and reasoning.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cardan.engine.api import GenerateOutput
from cardan.server.chats.preparation import PreparedChat, prepare_chat
from cardan.server.chats.unenforced import name_unenforced
from cardan.server.generation import Choice, Job, check_failed, new_choices, run_job, run_to_end, run_until
from cardan.server.http.bodies import parse_body, read_object
from cardan.server.http.disconnects import while_connected
from cardan.server.http.replies import JsonResponse
from cardan.server.http.sse import open_stream
from cardan.server.openai.bodies import CHAT_REFUSED, ChatBody, StreamOptions
from cardan.server.openai.deltas import AnswerReader, Delta
from cardan.server.openai.hidden import shown_state
from cardan.server.openai.logprobs import chat_logprobs
from cardan.server.openai.usage import add_limits, finish_name, usage_object
from cardan.server.state import ServerState, state_of
from cardan.types import FinishKind, FinishReason


@dataclass(frozen=True, slots=True)
class _Chat:
    """One checked request.

    Attributes:
        state: of the server.
        prepared: what the engine is asked, and how answers are read.
        options: where a stream tells usage.
    """

    state: ServerState
    prepared: PreparedChat
    options: StreamOptions

    @property
    def body(self) -> ChatBody:
        """The body of the request."""
        return self.prepared.body

    @property
    def job(self) -> Job:
        """What the engine is asked."""
        return self.prepared.job

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
    options = body.usage_in_stream()
    with state.preparing(body.rid or f"chatcmpl-{uuid.uuid4().hex}") as live:
        prepared = await while_connected(request, prepare_chat(state, body, live))
        return await _respond(request, _Chat(state, prepared, options))


async def _respond(request: Request, chat: _Chat) -> Response:
    state = chat.state
    if chat.body.stream:
        return name_unenforced(await open_stream(request, _stream(chat)), state, chat.job)
    choices = new_choices(chat.job)
    await while_connected(request, _run(chat, choices))
    return name_unenforced(JsonResponse(_whole(chat, choices[0])), state, chat.job)


async def _run(chat: _Chat, choices: list[list[Choice]]) -> None:
    """Run a chat to its end, or to the end of the first call where only one is wanted."""
    if chat.body.parallel_tool_calls or chat.body.n > 1:
        await run_to_end(chat.state, chat.job, choices)
        return
    reader = chat.prepared.reader()
    async with contextlib.aclosing(run_until(chat.state, chat.job, lambda: reader.has_enough)) as outputs:
        async for _, output in outputs:
            choices[0][0].add(output)
            reader.read(output.text, ends=output.finish_reason is not None)


def _outputs(chat: _Chat, readers: Mapping[int, AnswerReader]) -> AsyncGenerator[tuple[int, GenerateOutput], None]:
    """What a stream is made of; it ends with the first call where one choice has only one."""
    if chat.body.n > 1:
        return run_job(chat.state, chat.job)
    return run_until(chat.state, chat.job, lambda: 0 in readers and readers[0].has_enough)


def _finish(reason: FinishReason | None, reader: AnswerReader) -> dict[str, Any]:
    finish = finish_name(reason)
    if reason is not None and reason.kind is FinishKind.STOP and reader.has_called:
        finish["finish_reason"] = "tool_calls"
    return finish


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
    reader = chat.prepared.reader()
    reader.push(choice.text, ends=True)
    return {
        "index": index,
        "message": reader.message(with_reasoning=chat.prepared.separates_reasoning),
        "logprobs": logprobs,
        **_finish(choice.finish_reason, reader),
        **shown_state(chat.body, choice.hidden_state),
    }


async def _stream(chat: _Chat) -> AsyncGenerator[Any, None]:
    choices = new_choices(chat.job)[0]
    readers: dict[int, AnswerReader] = {}
    async with contextlib.aclosing(_outputs(chat, readers)) as outputs:
        async for _, output in outputs:
            choices[output.index].add(output)
            check_failed(output.finish_reason)
            chunks: list[dict[str, Any]] = []
            if output.index not in readers:
                readers[output.index] = chat.prepared.reader()
                chunks.append(_chunk(chat, output.index, {"role": "assistant", "content": ""}))
            chunks += _news(chat, output, readers[output.index])
            if output.finish_reason is not None:
                state = shown_state(chat.body, choices[output.index].hidden_state)
                chunks[-1]["choices"][0]["delta"].update(state)
            for chunk in chunks:
                if chat.options.include_usage:
                    continuous = chat.options.continuous_usage_stats
                    chunk["usage"] = usage_object(chat.state, [choices]) if continuous else None
                yield chunk
    if chat.options.include_usage:
        yield {**chat.head("chat.completion.chunk"), "choices": [], "usage": usage_object(chat.state, [choices])}


def _news(chat: _Chat, output: GenerateOutput, reader: AnswerReader) -> Iterator[dict[str, Any]]:
    """What one output of the engine adds to its choice."""
    deltas = reader.push(output.text, ends=output.finish_reason is not None)
    logprobs = None
    if chat.body.logprobs and output.token_ids:
        logprobs = chat_logprobs(output.token_ids, output.logprobs, chat.state.engine.tokenizer)
        deltas = deltas or [{"content": ""}]
    for delta in deltas:
        yield _chunk(chat, output.index, delta, logprobs)
        logprobs = None
    if output.finish_reason is not None:
        last = _chunk(chat, output.index, {})
        last["choices"][0].update(_finish(output.finish_reason, reader))
        add_limits(last, [output], asked_for_output=chat.body.limit() is not None)
        yield last


def _chunk(chat: _Chat, index: int, delta: Delta, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    chunk = chat.head("chat.completion.chunk")
    chunk["choices"] = [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}]
    return chunk
