"""``/v1/responses``: OpenAI's responses API, whole, streamed and in the background, with what was stored.

It does not know how a conversation becomes a prompt, nor how an answer is taken apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cardan.engine.api import GenerateOutput
from cardan.errors import RequestAbortedError, RequestError
from cardan.parsers import Event, Reasoning
from cardan.server.chats.pieces import read_pieces
from cardan.server.chats.turns import Turn, effort_fields, open_turn
from cardan.server.chats.unenforced import name_unenforced
from cardan.server.http.bodies import parse_body, read_object, shorten
from cardan.server.http.disconnects import while_connected
from cardan.server.http.replies import ErrorReply, JsonResponse, describe_error
from cardan.server.http.sse import StreamForm, encode_typed_event, open_stream
from cardan.server.openai.logprobs import chat_logprobs
from cardan.server.openai.responses.bodies import RESPONSES_REFUSED, ResponsesBody, chat_fields, check_body, read_effort
from cardan.server.openai.responses.input import listed_items, read_input
from cardan.server.openai.responses.output import ItemWriter
from cardan.server.openai.responses.store import ResponseStore, StoredResponse
from cardan.server.state import LiveRequest, ServerState, state_of
from cardan.types import FinishKind

LIST_QUERY = ("limit", "order", "after", "include")
"""Query parameters of the listing of input items."""

GET_QUERY = ("include", "include[]")

logger = logging.getLogger("cardan.server")


def _encode_error(reply: ErrorReply) -> bytes:
    told = {"message": reply.message, "code": reply.code, "param": reply.param}
    return encode_typed_event({"type": "error", **told, "sequence_number": 0})


FORM = StreamForm(encode=encode_typed_event, encode_error=_encode_error, end=b"")


@dataclass(slots=True)
class _Run:
    """One response under way.

    Attributes:
        turn: what runs.
        body: of the request.
        messages: the conversation that was sent, with that of the response before it, without instructions.
        writer: of its items.
        reasoning_tokens: tokens before the first that is no reasoning.
        untold_tokens: tokens since, whose text is held back.
        answered: whether anything but reasoning was found.
        status: as the object tells it.
        error: why it failed.
        completed: Unix time of its end.
    """

    turn: Turn
    body: ResponsesBody
    messages: list[dict[str, Any]]
    writer: ItemWriter = field(default_factory=ItemWriter)
    reasoning_tokens: int = 0
    untold_tokens: int = 0
    answered: bool = False
    status: str = "in_progress"
    error: dict[str, Any] | None = None
    completed: float | None = None

    @property
    def response_id(self) -> str:
        """The id that the client knows."""
        return self.turn.job.request_id

    def take(self, found: list[Event], output: GenerateOutput) -> list[dict[str, Any]]:
        """Take news; returns what a stream says of them."""
        self.answered = self.answered or any(not isinstance(event, Reasoning) for event in found)
        self.untold_tokens += len(output.token_ids)
        if found or self.answered:
            # Tokens whose text was held back belong to what is found now.
            self.reasoning_tokens += 0 if self.answered else self.untold_tokens
            self.untold_tokens = 0
        logprobs = None
        if self.body.wants_logprobs:
            logprobs = chat_logprobs(output.token_ids, output.logprobs, self.turn.state.engine.tokenizer)["content"]
        events = self.writer.write(found, logprobs)
        if output.finish_reason is not None:
            cut = output.finish_reason.kind is FinishKind.LENGTH
            events += self.writer.end("incomplete" if cut else "completed")
            self.finish("incomplete" if cut else "completed")
        return events

    def finish(self, status: str, error: dict[str, Any] | None = None) -> None:
        """Note the end."""
        self.status, self.error, self.completed = status, error, time.time()

    def response(self) -> dict[str, Any]:
        """The response object as of now."""
        body, state = self.body, self.turn.state
        sampling = self.turn.job.requests[0].sampling
        ended = self.status not in ("queued", "in_progress")
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.turn.job.created,
            "completed_at": self.completed if self.status == "completed" else None,
            "status": self.status,
            "background": body.background,
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": state.model_name,
            "output": list(self.writer.items),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.get("effort"), "summary": body.reasoning.get("summary")},
            "store": body.store,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}, **body.text},
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "top_logprobs": body.top_logprobs,
            "top_p": sampling.top_p,
            "truncation": body.truncation,
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        choice = self.turn.choice
        cached = choice.cached_tokens if self.turn.state.config.server.enable_cache_report else 0
        return {
            "input_tokens": choice.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": choice.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": choice.prompt_tokens + choice.completion_tokens,
        }

    def conversation(self) -> list[dict[str, Any]]:
        """The conversation with the answer."""
        found = self.turn.answer
        said: dict[str, Any] = {"role": "assistant", "content": found.content}
        if found.reasoning:
            said["reasoning_content"] = found.reasoning
        if found.calls:
            said["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in found.calls.values()
            ]
        return [*self.messages, said]


def store_of(request: Request) -> ResponseStore:
    """The responses that the server keeps."""
    store: ResponseStore = request.app.state.responses
    return store


async def create(request: Request) -> Response:
    """POST ``/v1/responses``."""
    state, store = state_of(request), store_of(request)
    state.check_accepting()
    data = await read_object(request, state.config.server.max_body_bytes)
    body = parse_body(ResponsesBody, data, RESPONSES_REFUSED)
    check_body(body)
    with contextlib.ExitStack() as known:
        live = known.enter_context(state.preparing(f"resp_{uuid.uuid4().hex}"))
        run = await while_connected(request, _open(state, store, body, live))
        if not body.background:
            return await _respond(request, run, store)
        response = JsonResponse(_start(run, store, known))
        return name_unenforced(response, state, run.turn.job)


async def _respond(request: Request, run: _Run, store: ResponseStore) -> Response:
    state, job = run.turn.state, run.turn.job
    if run.body.stream:
        return name_unenforced(await open_stream(request, _stream(run, store), FORM), state, job)
    await while_connected(request, _run_to_end(run))
    _keep(run, store)
    return name_unenforced(JsonResponse(run.response()), state, job)


async def _open(state: ServerState, store: ResponseStore, body: ResponsesBody, live: LiveRequest) -> _Run:
    pieces = body.input if isinstance(body.input, list) else []
    read = await read_pieces(pieces, "input", lambda: read_input(body.input))
    messages = [*_earlier(store, body.previous_response_id), *read]
    shown = messages
    if body.instructions is not None:
        shown = [{"role": "system", "content": body.instructions}, *messages]
    fields = chat_fields(body) | effort_fields(state, read_effort(body), "reasoning.effort")
    turn = await open_turn(state, {**fields, "messages": shown}, live)
    return _Run(turn, body, messages)


def _earlier(store: ResponseStore, name: str | None) -> list[dict[str, Any]]:
    if name is None:
        return []
    stored = store.get(name)
    if stored is None:
        raise RequestError(
            f"The previous response '{shorten(name)}' is not kept here ({store.describe()}). Send the whole "
            "conversation as 'input'.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if stored.response["status"] not in ("completed", "incomplete"):
        raise RequestError(
            f"The previous response '{shorten(name)}' is {stored.response['status']}; only one that has an answer can "
            "be gone on from.",
            param="previous_response_id",
        )
    return stored.messages


def _keep(run: _Run, store: ResponseStore) -> None:
    if run.body.store:
        store.put(StoredResponse(run.response(), listed_items(run.body.input), run.conversation()))


async def _run_to_end(run: _Run) -> None:
    async with contextlib.aclosing(run.turn.news()) as news:
        async for found, output in news:
            run.take(found, output)


async def _stream(run: _Run, store: ResponseStore) -> AsyncGenerator[Any, None]:
    number = 0

    def numbered(event: dict[str, Any]) -> dict[str, Any]:
        nonlocal number
        number += 1
        return {**event, "sequence_number": number - 1}

    begun = False
    try:
        async with contextlib.aclosing(run.turn.news()) as news:
            async for found, output in news:
                if not begun:
                    begun = True
                    for kind in ("created", "in_progress"):
                        yield numbered({"type": f"response.{kind}", "response": run.response()})
                for event in run.take(found, output):
                    yield numbered(event)
    except Exception as error:
        if not begun:
            raise
        _fail(run, error)
    if run.status != "failed":
        _keep(run, store)
    yield numbered({"type": f"response.{run.status}", "response": run.response()})


def _fail(run: _Run, error: Exception) -> None:
    reply = describe_error(error)
    run.finish("failed", {"code": "server_error", "message": reply.message})


def _start(run: _Run, store: ResponseStore, known: contextlib.ExitStack) -> dict[str, Any]:
    """Run a response in the background; returns it as it begins. ``known`` is left when its task has ended."""
    run.status = "queued"
    stored = StoredResponse(run.response(), listed_items(run.body.input))
    stored.task = asyncio.create_task(_run_behind(run, store, stored))
    kept = known.pop_all()
    stored.task.add_done_callback(lambda _: kept.close())
    store.put(stored)
    return stored.response


async def _run_behind(run: _Run, store: ResponseStore, stored: StoredResponse) -> None:
    run.status = "in_progress"
    stored.response = run.response()
    try:
        await _run_to_end(run)
    except RequestAbortedError:
        run.finish("cancelled")
    except Exception as error:  # noqa: BLE001 - nobody waits for it; the response tells it
        _fail(run, error)
    stored.task = None
    stored.response, stored.messages = run.response(), run.conversation()
    if store.get(run.response_id) is stored:
        store.put(stored)


def _find(request: Request) -> StoredResponse:
    name, store = request.path_params["response_id"], store_of(request)
    stored = store.get(name)
    if stored is None:
        raise HTTPException(
            404,
            f"There is no response '{shorten(name)}'. It was never stored, was deleted, or made room for newer ones: "
            f"{store.describe()}.",
        )
    return stored


async def retrieve(request: Request) -> Response:
    """GET ``/v1/responses/{response_id}``."""
    return JsonResponse(_find(request).response)


async def delete(request: Request) -> Response:
    """DELETE ``/v1/responses/{response_id}``; one that runs in the background is aborted."""
    stored = _find(request)
    name = stored.response["id"]
    if stored.task is not None:
        await state_of(request).abort(name)
    store_of(request).delete(name)
    return JsonResponse({"id": name, "object": "response", "deleted": True})


async def cancel(request: Request) -> Response:
    """POST ``/v1/responses/{response_id}/cancel``; one that has ended stays as it is."""
    stored = _find(request)
    if not stored.response["background"]:
        raise RequestError('Only responses with "background": true can be cancelled; close the connection of others.')
    task = stored.task
    if task is not None:
        while not task.done():
            # Asked again until it ends: it may not have reached the engine yet.
            await state_of(request).abort(stored.response["id"])
            await asyncio.wait({task}, timeout=0.05)
    return JsonResponse(stored.response)


async def input_items(request: Request) -> Response:
    """GET ``/v1/responses/{response_id}/input_items``."""
    items = _find(request).items
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"'order' must be 'asc' or 'desc', got '{shorten(order)}'.", param="order")
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= 100):
        raise RequestError(f"'limit' must be a number from 1 to 100, got '{shorten(limit)}'.", param="limit")
    listed = items if order == "asc" else items[::-1]
    after = query.get("after")
    if after is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise RequestError(f"'after' is '{shorten(after)}', which is no item of this response.", param="after")
        listed = listed[places[0] + 1 :]
    page = listed[: int(limit)]
    return JsonResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(listed) > len(page),
        }
    )
