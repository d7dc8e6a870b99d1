"""``/separate_reasoning`` and ``/parse_function_call``: take a text apart that a model has written before.

It runs no model. Whoever gets raw text from ``/generate`` asks here what is in it.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cardan.errors import ConfigError, RequestError
from cardan.parsers import AnswerFormat, ParserContext, Wanted, choose_parsers, read_answer
from cardan.server.chats.preparation import answer_format
from cardan.server.http.bodies import Body, parse_body, read_object
from cardan.server.http.replies import JsonResponse
from cardan.server.openai.tools import read_tool_use
from cardan.server.state import state_of

LONG_TEXT = 16384
"""Longer texts are taken apart in a thread, so that other requests go on."""

MAX_TEXT = 2**20
"""Longest text, in characters: more than a model writes, and taking it apart costs a second or more."""

Text = Annotated[str, Field(max_length=MAX_TEXT)]


class SeparateBody(Body):
    """Body of ``/separate_reasoning``."""

    text: Text
    reasoning_parser: str | None = None


class ParseCallBody(Body):
    """Body of ``/parse_function_call``."""

    text: Text
    tools: list[Any] | None = None
    tool_call_parser: str | None = None


async def separate_reasoning(request: Request) -> Response:
    """POST ``/separate_reasoning``: ``text`` becomes ``reasoning_text`` and the rest."""
    state = state_of(request)
    body = parse_body(SeparateBody, await read_object(request, state.config.server.max_body_bytes))
    name = _name("reasoning_parser", body.reasoning_parser) or answer_format(state).reasoning_parser
    if name is None:
        raise _nothing_known("reasoning_parser", "--reasoning-parser")
    answer = await _read(AnswerFormat(None, name), Wanted(), body.text)
    return JsonResponse({"reasoning_text": answer.reasoning, "text": answer.content})


async def parse_function_call(request: Request) -> Response:
    """POST ``/parse_function_call``: the calls in ``text``, and what is left of it."""
    state = state_of(request)
    body = parse_body(ParseCallBody, await read_object(request, state.config.server.max_body_bytes))
    name = _name("tool_call_parser", body.tool_call_parser) or answer_format(state).tool_parser
    if name is None:
        raise _nothing_known("tool_call_parser", "--tool-call-parser")
    tools = read_tool_use(body.tools, None)
    wanted = Wanted(tools=ParserContext(tools=tools.schemas or {}), reasoning=False)
    answer = await _read(AnswerFormat(name, None), wanted, body.text)
    calls = [
        {"tool_index": index, "name": call.name, "parameters": call.arguments}
        for index, call in enumerate(answer.calls.values())
    ]
    return JsonResponse({"normal_text": answer.content, "calls": calls})


async def _read(form: AnswerFormat, wanted: Wanted, text: str) -> Any:
    if len(text) > LONG_TEXT:
        return await asyncio.to_thread(read_answer, form.parser(wanted), text)
    return read_answer(form.parser(wanted), text)


def _name(field: str, value: str | None) -> str | None:
    """A parser that a request names.

    Raises:
        RequestError: there is none of that name.
    """
    if value is None:
        return None
    names = (value, "none") if field == "tool_call_parser" else ("none", value)
    try:
        return next((name for name in choose_parsers(*names, ()) if name is not None), None)
    except ConfigError as error:
        message = str(error).replace("--tool-call-parser", f"'{field}'").replace("--reasoning-parser", f"'{field}'")
        raise RequestError(message, param=field, code="invalid_value") from None


def _nothing_known(field: str, flag: str) -> RequestError:
    return RequestError(
        f"'{field}' is needed, since this server knows no format of its model. Send it, or start it with {flag}.",
        param=field,
        code="missing_required_parameter",
    )
