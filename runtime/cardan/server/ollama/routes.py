"""``/api/chat`` and ``/api/generate``: Ollama's API, whole and streamed line by line.

It does not know how a conversation becomes a prompt, nor how an answer is taken apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cardan.engine.api import GenerateOutput, GenerateRequest, RequestTimes
from cardan.errors import RequestError
from cardan.parsers import CallEnd, Content, Event, Reasoning
from cardan.parsers.reasoning import PlainParser
from cardan.server.chats.pieces import read_pieces
from cardan.server.chats.preparation import answer_format
from cardan.server.chats.turns import Turn, effort_fields, open_turn, thinking_fields
from cardan.server.chats.unenforced import name_unenforced
from cardan.server.generation import Job
from cardan.server.http.bodies import parse_body, read_object
from cardan.server.http.disconnects import while_connected
from cardan.server.http.replies import ErrorReply, JsonResponse
from cardan.server.http.sse import StreamForm, open_stream
from cardan.server.ollama.bodies import CHAT_REFUSED, GENERATE_REFUSED, ChatBody, GenerateBody, OllamaBody, Options
from cardan.server.ollama.models import check_model, stamp
from cardan.server.ollama.prompts import fill_template, read_conversation
from cardan.server.openai.deltas import AnswerReader
from cardan.server.openai.logprobs import chat_logprobs
from cardan.server.prompts import encode_prompt
from cardan.server.sampling import SamplingBody
from cardan.server.state import LiveRequest, ServerState, state_of
from cardan.types import FinishKind, LogprobParams

NDJSON = "application/x-ndjson"


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _encode_error(reply: ErrorReply) -> bytes:
    return _encode(reply.body("/api/"))


FORM = StreamForm(media_type=NDJSON, encode=_encode, encode_error=_encode_error, end=b"")


@dataclass(slots=True)
class _Answer:
    """One answer under way.

    Attributes:
        turn: what runs.
        body: of the request.
        shows_thinking: whether reasoning is told.
        times: of the last output.
    """

    turn: Turn
    body: OllamaBody
    shows_thinking: bool
    times: RequestTimes = field(default_factory=RequestTimes)

    @property
    def is_chat(self) -> bool:
        """Whether answers are messages."""
        return isinstance(self.body, ChatBody)

    def part(self, text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """A line that says what was found."""
        extra: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            extra["tool_calls"] = calls
        said = {"response": text, **extra}
        if self.is_chat:
            said = {"message": {"role": "assistant", "content": text, **extra}}
        return {"model": self.body.model, "created_at": stamp(time.time()), **said, "done": False}

    def ending(self) -> dict[str, Any]:
        """What the last line says beside ``done``."""
        choice, times = self.turn.choice, self.times
        reason = choice.finish_reason
        first_s = times.first_token_s if times.first_token_s is not None else times.e2e_s
        return {
            "done": True,
            "done_reason": "length" if reason is not None and reason.kind is FinishKind.LENGTH else "stop",
            "total_duration": _nanoseconds(times.e2e_s),
            "load_duration": 0,
            "prompt_eval_count": choice.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first_s - times.queue_s),
            "eval_count": choice.completion_tokens,
            "eval_duration": _nanoseconds(times.e2e_s - first_s),
        }

    def logprobs(self, output: GenerateOutput) -> list[dict[str, Any]]:
        """Logprobs of an output's tokens, where they are wanted."""
        if not self.body.logprobs:
            return []
        form = chat_logprobs(output.token_ids, output.logprobs, self.turn.state.engine.tokenizer)
        entries: list[dict[str, Any]] = form["content"]
        return entries


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


async def chat(request: Request) -> Response:
    """POST ``/api/chat``."""
    state = state_of(request)
    state.check_accepting()
    body = parse_body(ChatBody, await read_object(request, state.config.server.max_body_bytes), CHAT_REFUSED)
    check_model(state, body.model)
    options = body.read_options(state.engine.info)
    if not body.messages:
        return _loaded(body)
    with state.preparing(_new_id()) as live:
        turn = await while_connected(request, _open_messages(state, body, options, live))
        return await _respond(request, turn, body)


async def generate(request: Request) -> Response:
    """POST ``/api/generate``."""
    state = state_of(request)
    state.check_accepting()
    body = parse_body(GenerateBody, await read_object(request, state.config.server.max_body_bytes), GENERATE_REFUSED)
    check_model(state, body.model)
    options = body.read_options(state.engine.info)
    if body.raw and (body.system or body.template):
        raise RequestError("'raw' takes 'prompt' as it is, without 'system' and 'template'. Drop them.", param="raw")
    if not body.prompt and not body.system:
        return _loaded(body)
    with state.preparing(_new_id()) as live:
        turn = await while_connected(request, _open_prompt(state, body, options, live))
        return await _respond(request, turn, body)


def _new_id() -> str:
    return f"gen-{uuid.uuid4().hex}"


def _loaded(body: OllamaBody) -> Response:
    """Without a prompt clients only want the model in memory, where it is."""
    said: dict[str, Any] = {"response": ""}
    if isinstance(body, ChatBody):
        said = {"message": {"role": "assistant", "content": ""}}
    head = {"model": body.model, "created_at": stamp(time.time())}
    line = _encode({**head, **said, "done": True, "done_reason": "load"})
    return Response(line, media_type=NDJSON if body.stream else "application/json")


def _chat_fields(state: ServerState, body: OllamaBody, options: Options) -> dict[str, Any]:
    fields: dict[str, Any] = {**options.fields(), **body.format_fields(), **_think_fields(state, body.think)}
    fields["max_tokens"] = options.limit
    if body.top_logprobs or body.logprobs:
        fields |= {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    return fields


def _think_fields(state: ServerState, think: object) -> dict[str, Any]:
    if think is None or isinstance(think, bool):
        return {} if think is None else thinking_fields(state, think, "think")
    if isinstance(think, str) and think in ("low", "medium", "high"):
        return effort_fields(state, think, "think")
    raise RequestError("'think' must be true, false, 'low', 'medium' or 'high'.", param="think", code="invalid_value")


async def _open_messages(state: ServerState, body: ChatBody, options: Options, live: LiveRequest) -> Turn:
    """The turn that a body of ``/api/chat`` asks for."""
    messages = await read_pieces(body.messages, "messages", lambda: read_conversation(body.messages))
    fields = {**_chat_fields(state, body, options), "messages": messages}
    if body.tools:
        fields["tools"] = body.tools
    if messages[-1]["role"] == "assistant":
        fields["continue_final_message"] = True
    turn = await open_turn(state, fields, live)
    return _within_context(turn, options, turn.prompt_tokens)


async def _open_prompt(state: ServerState, body: GenerateBody, options: Options, live: LiveRequest) -> Turn:
    """The turn that a body of ``/api/generate`` asks for."""
    if body.raw or body.template:
        text = fill_template(body.template, body.prompt, body.system or "") if body.template else body.prompt
        return await _open_raw(state, body, options, text, live)
    messages = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": body.prompt})
    fields = {**_chat_fields(state, body, options), "messages": messages}
    turn = await open_turn(state, fields, live)
    return _within_context(turn, options, turn.prompt_tokens)


def _within_context(turn: Turn, options: Options, prompt_tokens: int) -> Turn:
    """Lower the limit of the output to what ``num_ctx`` leaves of the context."""
    if options.num_ctx is None:
        return turn
    room = options.num_ctx - prompt_tokens
    if room < 1:
        raise RequestError(
            f"The prompt has {prompt_tokens} tokens, which leaves no room for an answer in 'options.num_ctx' "
            f"{options.num_ctx}. Shorten the prompt, or raise it.",
            param="options.num_ctx",
            code="context_length_exceeded",
        )
    (request,) = turn.job.requests
    limit = min(request.sampling.max_new_tokens, room)
    sampling = dataclasses.replace(request.sampling, max_new_tokens=limit)
    turn.job = dataclasses.replace(turn.job, requests=(dataclasses.replace(request, sampling=sampling),))
    return turn


async def _open_raw(state: ServerState, body: GenerateBody, options: Options, text: str, live: LiveRequest) -> Turn:
    """A prompt that no chat template is put around; calls and reasoning are not looked for in its answer."""
    if body.format_fields():
        raise RequestError(
            "'format' works with the model's own chat template only; send neither 'raw' nor 'template'.", param="format"
        )
    if body.think:
        raise RequestError(
            "'think' works with the model's own chat template only; send neither 'raw' nor 'template'.", param="think"
        )
    if body.top_logprobs and not body.logprobs:
        raise RequestError("'top_logprobs' has no effect without \"logprobs\": true.", param="top_logprobs")
    state.check_text(text, "prompt")
    info = state.engine.info
    ids = await encode_prompt(state.engine.tokenizer, text)
    room = max(1, min(info.context_length, info.max_total_tokens) - min(len(ids), info.max_input_tokens) - 1)
    limit = room if options.limit is None else options.limit
    generate_request = GenerateRequest(
        input_ids=ids,
        sampling=parse_body(SamplingBody, options.fields()).sampling(limit, 0, info),
        logprobs=LogprobParams(output=True, top=body.top_logprobs) if body.logprobs else LogprobParams(),
        rid=live.request_id,
        add_special_tokens=False,
    )
    job = Job(live.request_id, (generate_request,), live=live)
    turn = Turn(state, job, AnswerReader(PlainParser()))
    return _within_context(turn, options, len(ids))


async def _respond(request: Request, turn: Turn, body: OllamaBody) -> Response:
    shows = body.think is not False and answer_format(turn.state).reasoning is not None
    said = _Answer(turn, body, shows)
    if body.stream:
        return name_unenforced(await open_stream(request, _lines(said), FORM), turn.state, turn.job)
    return name_unenforced(JsonResponse(await while_connected(request, _whole(said))), turn.state, turn.job)


async def _whole(said: _Answer) -> dict[str, Any]:
    logprobs: list[dict[str, Any]] = []
    async with contextlib.aclosing(said.turn.news()) as news:
        async for _, output in news:
            said.times = output.times
            logprobs += said.logprobs(output)
    found = said.turn.answer
    calls = [_call(call.name, call.arguments) for call in found.calls.values()]
    whole = said.part(found.content, found.reasoning if said.shows_thinking else "", calls)
    if said.body.logprobs:
        whole["logprobs"] = logprobs
    return whole | said.ending()


async def _lines(said: _Answer) -> AsyncGenerator[Any, None]:
    async with contextlib.aclosing(said.turn.news()) as news:
        async for events, output in news:
            said.times = output.times
            logprobs = said.logprobs(output)
            lines = [said.part(*found) for found in _found(said, events)]
            if logprobs:
                lines = lines or [said.part("")]
                lines[0]["logprobs"] = logprobs
            for line in lines:
                yield line
    yield said.part("") | said.ending()


def _found(said: _Answer, events: list[Event]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Text, thinking and complete calls, for a line each."""
    lines: list[tuple[str, str, list[dict[str, Any]]]] = []
    for event in events:
        match event:
            case Content(text):
                lines.append((text, "", []))
            case Reasoning(text) if said.shows_thinking:
                lines.append(("", text, []))
            case CallEnd(index):
                call = said.turn.answer.calls[index]
                lines.append(("", "", [_call(call.name, call.arguments)]))
    return lines


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": msgspec.json.decode(arguments) if arguments else {}}}
