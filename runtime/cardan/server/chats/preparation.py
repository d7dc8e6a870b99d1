"""What a chat asks of the engine, and how its answers are to be read; every API of chats goes through here.

It knows no form of a response.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import Any

from cardan.engine.api import GenerateRequest
from cardan.engine.logit_processors import read_processor
from cardan.errors import RequestError
from cardan.grammar import spells_special_tokens, takes_kind
from cardan.grammar_spec import GrammarKind
from cardan.parsers import AnswerFormat, ParserContext, ToolFormat, Wanted, new_call_id
from cardan.server.chats.forced_calls import forced_grammar, strict_grammar
from cardan.server.chats.pieces import read_pieces
from cardan.server.generation import Job
from cardan.server.openai.bodies import ChatBody, read_messages
from cardan.server.openai.deltas import AnswerReader
from cardan.server.openai.tools import ToolUse, read_tool_use
from cardan.server.prompts import LONG_TEXT, encode_prompt
from cardan.server.state import LiveRequest, ServerState
from cardan.types import LogprobParams, SamplingParams

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables with which chat templates turn reasoning on and off."""


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A checked chat.

    Attributes:
        body: of the request.
        job: what the engine is asked.
        form: how the model writes calls and reasoning.
        wanted: what is told apart in the answers.
    """

    body: ChatBody
    job: Job
    form: AnswerFormat
    wanted: Wanted

    def reader(self) -> AnswerReader:
        """Reads one choice."""
        body = self.body
        return AnswerReader(
            self.form.parser(self.wanted),
            one_call=not body.parallel_tool_calls,
            streams_reasoning=body.stream_reasoning,
        )

    @property
    def separates_reasoning(self) -> bool:
        """Whether reasoning is told apart from content."""
        return self.wanted.reasoning and self.form.reasoning is not None


def answer_format(state: ServerState) -> AnswerFormat:
    """How the served model writes calls and reasoning.

    Raises:
        ConfigError: a flag names a parser that there is none of.
    """
    flags, templates = state.config.model, state.engine.tokenizer.chat_templates
    return AnswerFormat.choose(flags.tool_call_parser, flags.reasoning_parser, tuple(templates.values()))


async def prepare_chat(state: ServerState, body: ChatBody, live: LiveRequest) -> PreparedChat:
    """Check a chat, render its prompt, and find out how its answers are to be read.

    Args:
        state: of the server.
        body: of the request.
        live: under which the chat is known meanwhile, and whose id it gets.

    Raises:
        RequestError: the conversation or a field is wrong.
    """
    if body.top_logprobs and not body.logprobs:
        raise RequestError("'top_logprobs' has no effect without \"logprobs\": true.", param="top_logprobs")
    limit, minimum = body.limit(), body.minimum()
    messages = await read_pieces(body.messages, "messages", lambda: read_messages(body.messages))
    form = answer_format(state)
    tools = _read_tools(state, form, body)
    prompt = await _render(state, body, messages, tools)
    state.check_text(prompt, "messages")
    ids = await encode_prompt(state.engine.tokenizer, prompt, add_special_tokens=False)
    info = state.engine.info
    kept = min(len(ids), info.max_input_tokens)  # what is more is refused or cut
    room = max(1, min(info.context_length, info.max_total_tokens) - kept - 1)
    begun = _begun(form, messages[-1]["content"]) if body.continue_final_message else prompt
    wanted = _wanted(state, form, body, tools, begun)
    sampling = body.sampling(room if limit is None else limit, minimum, info)
    sampling = _with_grammar(state, sampling, (form, wanted), tools, body.parallel_tool_calls)
    if sampling.grammar is not None and sampling.grammar.starts_after:
        wanted = dataclasses.replace(wanted, reasons_first=True)
    if wanted.tools is not None and wanted.tools.framed:
        # What the parsers of all choices share takes long to make where there are many functions.
        await asyncio.to_thread(form.parser, wanted)
    generate = GenerateRequest(
        input_ids=ids,
        sampling=_with_markers(state, sampling, form, wanted),
        logprobs=LogprobParams(output=True, top=body.top_logprobs) if body.logprobs else LogprobParams(),
        rid=live.request_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        routing_key=body.routing_key,
        hidden_states=body.return_hidden_states,
        processor=read_processor(body.custom_logit_processor),
        add_special_tokens=False,
    )
    job = Job(live.request_id, (generate,), unenforced=_unheld(tools, wanted), live=live)
    return PreparedChat(body, job, form, wanted)


def _read_tools(state: ServerState, form: AnswerFormat, body: ChatBody) -> ToolUse:
    tools = read_tool_use(body.tools, body.tool_choice)
    if not tools.wanted:
        return tools
    tokenizer = state.engine.tokenizer
    if tokenizer.chat_templates and not tokenizer.template_reads("tools"):
        raise RequestError(
            "'tools' cannot be called: the model's chat template has no place for them. Leave the field out, or start "
            "the server with a --chat-template that has one, such as --chat-template chatml.",
            param="tools",
            code="unsupported_parameter",
        )
    if form.tools is None and not tools.forced:
        raise RequestError(
            "'tools' cannot be called: this server does not know how the model writes calls. Leave the field out, or "
            "start the server with --tool-call-parser NAME (docs/tools-and-reasoning.md lists the names).",
            param="tools",
            code="unsupported_parameter",
        )
    return tools


def _wanted(state: ServerState, form: AnswerFormat, body: ChatBody, tools: ToolUse, begun: str) -> Wanted:
    context = None
    if tools.wanted:
        calls = form.tools
        held = bool(tools.strict) and not tools.forced and calls is not None and _can_hold(state, calls)
        new_id = new_call_id if calls is None else calls.new_id
        context = ParserContext(tools=tools.schemas or {}, new_id=new_id, framed=held)
    return Wanted(
        tools=context,
        reasoning=body.separate_reasoning is not False,
        prompt=begun,
        forced=tools.wanted and tools.forced,
    )


def _can_hold(state: ServerState, calls: ToolFormat) -> bool:
    """Whether a grammar can hold the calls that the model decides to make."""
    backend = state.engine.info.grammar_backend
    if calls.frames is None or not takes_kind(GrammarKind.STRUCTURAL_TAG, backend):
        return False
    if spells_special_tokens(backend):
        return True
    tokenizer = state.engine.tokenizer
    written = "".join(begin + end for begin, end in calls.frames(""))
    marks = {tokenizer.token_id(mark) for mark in calls.markers if mark in written}
    return not marks & tokenizer.special_ids


def _unheld(tools: ToolUse, wanted: Wanted) -> tuple[str, ...]:
    """``strict``, where functions ask for it and no grammar can hold the calls that the model decides to make."""
    held = wanted.tools is None or wanted.tools.framed or wanted.forced
    return ("strict",) if tools.strict and not held else ()


def _with_grammar(
    state: ServerState, sampling: SamplingParams, prepared: tuple[AnswerFormat, Wanted], tools: ToolUse, parallel: bool
) -> SamplingParams:
    """Make the model call where a call is forced or strict, and let a grammar begin behind the reasoning."""
    form, wanted = prepared
    grammar = sampling.grammar
    if tools.wanted and grammar is not None:
        raise RequestError(
            "'response_format' and its like leave no room for calls of 'tools'. Send tool_choice 'none', or drop one.",
            param="tools",
            code="unsupported_parameter",
        )
    if tools.wanted and tools.forced:
        grammar = forced_grammar(tools, parallel=parallel)
    elif form.tools is not None and wanted.tools is not None and wanted.tools.framed:
        grammar = strict_grammar(tools, form.tools)
    if grammar is None:
        return sampling
    reasoning = form.reasoning
    if reasoning is not None and reasoning.build is None and not wanted.prompt.rstrip().endswith(reasoning.closing):
        ids = state.engine.tokenizer.encode(reasoning.closing, add_special_tokens=False)
        grammar = dataclasses.replace(grammar, starts_after=tuple(ids))
    return dataclasses.replace(sampling, grammar=grammar)


def _begun(form: AnswerFormat, content: str) -> str:
    """What stands for a prompt that ends within an answer: the tag that was written last."""
    tags = form.reasoning
    if tags is None:
        return ""
    return tags.opening if content.rfind(tags.opening) > content.rfind(tags.closing) else tags.closing


def _with_markers(state: ServerState, sampling: SamplingParams, form: AnswerFormat, wanted: Wanted) -> SamplingParams:
    """Keep the special tokens in the text that the parser needs to see."""
    tokenizer = state.engine.tokenizer
    ids = {tokenizer.token_id(text) for text in form.markers(wanted)}
    shown = tuple(sorted(token_id for token_id in ids if token_id is not None and token_id in tokenizer.special_ids))
    return dataclasses.replace(sampling, shown_special_ids=shown) if shown else sampling


async def _render(state: ServerState, body: ChatBody, messages: list[dict[str, Any]], tools: ToolUse) -> str:
    turn: dict[str, Any] = {"add_generation_prompt": body.add_generation_prompt is not False}
    if body.continue_final_message:
        _check_continues(body, messages[-1])
        turn = {"add_generation_prompt": False, "continue_final_message": True}
    turn |= body.chat_template_kwargs | _effort(state, body)
    if tools.wanted:
        turn["tools"] = list(tools.tools)
    if sum(len(message["content"]) for message in messages) > LONG_TEXT or tools.wanted:
        return await asyncio.to_thread(_render_now, state, messages, turn)
    return _render_now(state, messages, turn)


def _check_continues(body: ChatBody, last: dict[str, Any]) -> None:
    if last["role"] != "assistant":
        raise RequestError(
            f"'continue_final_message' needs a last message of the assistant, got one of '{last['role']}'.",
            param="continue_final_message",
        )
    if body.add_generation_prompt:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' contradict each other. Drop one.",
            param="continue_final_message",
        )


def _effort(state: ServerState, body: ChatBody) -> dict[str, Any]:
    """``reasoning_effort`` as the chat template takes it: by that name, or as a switch."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise RequestError(
            f"'reasoning_effort' is {effort[:40]!r}; it must be one of {', '.join(_EFFORTS)}.",
            param="reasoning_effort",
            code="invalid_value",
        )
    reads = state.engine.tokenizer.template_reads
    found: dict[str, Any] = {"reasoning_effort": effort} if reads("reasoning_effort") else {}
    if not found:
        found = {switch: effort != "none" for switch in THINKING_SWITCHES if reads(switch)}
    if not found:
        raise RequestError(
            "'reasoning_effort' has no effect: the model's chat template reads no such variable, and none of "
            f"{', '.join(THINKING_SWITCHES)}. Leave it out.",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    for name, value in found.items():
        if body.chat_template_kwargs.get(name, value) != value:
            raise RequestError(
                f"'reasoning_effort' and '{name}' in 'chat_template_kwargs' contradict each other. Drop one.",
                param="reasoning_effort",
            )
    return found


def _render_now(state: ServerState, messages: list[dict[str, Any]], turn: dict[str, Any]) -> str:
    try:
        return state.engine.tokenizer.render_chat(messages, **turn)
    except RecursionError:
        raise RequestError(
            "'messages', 'tools' or 'chat_template_kwargs' is nested too deeply for the chat template.",
            param="messages",
        ) from None
