"""``/v1/messages`` and its counting of tokens: Anthropic's API, whole and streamed.

It does not know how a conversation becomes a prompt, nor how an answer is taken apart.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cardan.errors import RequestError
from cardan.server.anthropic.blocks import BlockWriter
from cardan.server.anthropic.bodies import (
    MESSAGES_REFUSED,
    ConversationBody,
    CountBody,
    MessagesBody,
    read_output_config,
    read_thinking,
    shared_fields,
)
from cardan.server.anthropic.history import read_conversation
from cardan.server.chats.pieces import read_pieces
from cardan.server.chats.turns import Turn, effort_fields, open_turn, thinking_fields
from cardan.server.chats.unenforced import name_unenforced
from cardan.server.http.bodies import Refusal, is_anything, parse_body, read_object
from cardan.server.http.disconnects import while_connected
from cardan.server.http.replies import ErrorReply, JsonResponse
from cardan.server.http.sse import StreamForm, encode_typed_event, open_stream
from cardan.server.state import LiveRequest, ServerState, state_of
from cardan.types import FinishKind

QUERY = ("beta",)
"""Query parameters that Anthropic's clients send; they name drafts of the API and change nothing here."""

PATH = "/v1/messages"


def _encode_error(reply: ErrorReply) -> bytes:
    return encode_typed_event(reply.body(PATH))


FORM = StreamForm(encode=encode_typed_event, encode_error=_encode_error, end=b"")


@dataclass(slots=True)
class _Message:
    """One answer under way."""

    turn: Turn
    body: MessagesBody
    writer: BlockWriter

    def head(self) -> dict[str, Any]:
        """The message before anything was written."""
        return {
            "id": self.turn.job.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.turn.state.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(),
        }

    def usage(self) -> dict[str, Any]:
        """Token counts so far; what came from the cache is counted apart."""
        choice = self.turn.choice
        usage = {"input_tokens": choice.prompt_tokens, "output_tokens": choice.completion_tokens}
        if self.turn.state.config.server.enable_cache_report:
            usage["input_tokens"] -= choice.cached_tokens
            usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": choice.cached_tokens}
        return usage

    def ending(self) -> dict[str, Any]:
        """Why the answer ended."""
        reason, kind = self.turn.choice.finish_reason, "end_turn"
        matched = None
        if reason is not None and reason.kind is FinishKind.LENGTH:
            clamped = self.turn.choice.max_new_tokens_clamped is not None
            kind = "model_context_window_exceeded" if clamped else "max_tokens"
        elif self.turn.answer.calls:
            kind = "tool_use"
        elif reason is not None and isinstance(reason.matched, str):
            kind, matched = "stop_sequence", reason.matched
        return {"stop_reason": kind, "stop_sequence": matched}


async def messages(request: Request) -> Response:
    """POST ``/v1/messages``."""
    state = state_of(request)
    state.check_accepting()
    data = await read_object(request, state.config.server.max_body_bytes)
    body = parse_body(MessagesBody, data, MESSAGES_REFUSED)
    fields: dict[str, Any] = {"max_tokens": body.max_tokens}
    sampling = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    fields |= {name: value for name, value in sampling.items() if value is not None}
    if body.stop_sequences:
        fields["stop"] = list(body.stop_sequences)
    with state.preparing(_new_id()) as live:
        turn = await while_connected(request, _open(state, body, fields, live))
        return await _respond(request, turn, body)


async def _respond(request: Request, turn: Turn, body: MessagesBody) -> Response:
    thinking = read_thinking(body)
    show = thinking is not None and thinking.type != "disabled"
    omit = thinking is not None and thinking.display == "omitted"
    message = _Message(turn, body, BlockWriter(show_thinking=show, omit_thinking=omit))
    if body.stream:
        response: Response = await open_stream(request, _stream(message), FORM)
    else:
        response = JsonResponse(await while_connected(request, _whole(message)))
    response.headers["request-id"] = turn.job.request_id
    return name_unenforced(response, turn.state, turn.job)


def _new_id() -> str:
    return f"msg_{uuid.uuid4().hex}"


async def count_tokens(request: Request) -> Response:
    """POST ``/v1/messages/count_tokens``: how long the prompt of a conversation is."""
    state = state_of(request)
    data = await read_object(request, state.config.server.max_body_bytes)
    answering = {name: Refusal("it does not change the count.", is_anything) for name in _ANSWERING}
    body = parse_body(CountBody, data, {**MESSAGES_REFUSED, **answering})
    with state.preparing(_new_id()) as live:
        turn = await while_connected(request, _open(state, body, {"max_tokens": 1}, live))
    return JsonResponse({"input_tokens": turn.prompt_tokens})


_ANSWERING = tuple(name for name in MessagesBody.model_fields if name not in CountBody.model_fields)


async def _open(state: ServerState, body: ConversationBody, fields: dict[str, Any], live: LiveRequest) -> Turn:
    pieces = [{"content": body.system}, *body.messages]
    conversation = await read_pieces(pieces, "messages", lambda: read_conversation(body.messages, body.system))
    last = conversation[-1]
    if last["role"] == "assistant":
        if "tool_calls" in last:
            raise RequestError(
                "The last message calls tools; their results must follow it in a message of the user, as blocks of "
                "the type 'tool_result'.",
                param="messages",
            )
        fields["continue_final_message"] = True
    fields |= shared_fields(body) | _reasoning_fields(state, body)
    return await open_turn(state, {**fields, "messages": conversation}, live)


def _reasoning_fields(state: ServerState, body: ConversationBody) -> dict[str, Any]:
    thinking, effort = read_thinking(body), read_output_config(body).effort
    fields = effort_fields(state, effort, "output_config.effort")
    if thinking is not None and thinking.type != "adaptive":
        fields |= thinking_fields(state, thinking.type == "enabled", "thinking")
    return fields


async def _whole(message: _Message) -> dict[str, Any]:
    async with contextlib.aclosing(message.turn.news()) as news:
        async for found, _ in news:
            message.writer.write(found)
    message.writer.end()
    return {**message.head(), "content": message.writer.blocks, **message.ending()}


async def _stream(message: _Message) -> AsyncGenerator[Any, None]:
    begun = False
    async with contextlib.aclosing(message.turn.news()) as news:
        async for found, output in news:
            if not begun:
                begun = True
                # A stream reports no output before it is sent.
                head = message.head()
                head["usage"]["output_tokens"] = 0
                yield {"type": "message_start", "message": head}
                yield {"type": "ping"}
            for event in message.writer.write(found):
                yield event
            if output.finish_reason is not None:
                for event in message.writer.end():
                    yield event
    yield {"type": "message_delta", "delta": message.ending(), "usage": message.usage()}
    yield {"type": "message_stop"}
