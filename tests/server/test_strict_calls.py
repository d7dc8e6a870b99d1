"""Strict functions, format by format: the grammar lets a model write what the parser takes, and nothing else of it."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest
from grammar_words import WORDS_TOKENIZER, takes, vocabulary
from server_fakes import ServerThread, say
from test_chat_tools import NOW, PARIS, WEATHER, asking

from cardan.grammar import GRAMMAR_BACKENDS, GrammarOptions, GrammarVocabulary, spells_special_tokens
from cardan.grammar_spec import GrammarKind
from cardan.parsers import TOOL_FORMATS, AnswerFormat, ParserContext, Wanted, json_calls, read_answer
from cardan.parsers.source import Markers
from cardan.server.chats.forced_calls import strict_grammar
from cardan.server.openai.tools import read_tool_use

HELD = {name for name, form in TOOL_FORMATS.items() if form.frames is not None}
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</tool_call>',
    "qwen25": '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</tool_call>',
    "llama3": '{"name": "f", "parameters": ARGUMENTS}',
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\nARGUMENTS\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
}
"""How each model writes a call of ``f``."""
ALSO = ['{"name":"f","parameters":ARGUMENTS}', '{"type": "function", "name": "f", "parameters": ARGUMENTS}']
CASES = [*WRITTEN.items(), *(("llama3", text) for text in ALSO)]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "f", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "g"}},
]
USE = read_tool_use(TOOLS, None)


def calls(form: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    """What the parser of strict calls makes of an answer: its content and its calls."""
    parser = AnswerFormat(form).parser(Wanted(tools=ParserContext(tools=USE.schemas or {}, framed=True)))
    answer = read_answer(parser, text)
    return answer.content, [(call.name, call.arguments) for call in answer.calls.values()]


def with_marks(form: str) -> tuple[GrammarVocabulary, Callable[[str], list[int]]]:
    """A vocabulary in which the marks of a format are special tokens, and what makes tokens of an answer."""
    plain = vocabulary()
    marks = {mark: plain.size + place for place, mark in enumerate(TOOL_FORMATS[form].markers)}
    special = plain.special_ids | set(marks.values())
    tokens = [*plain.tokens, *(mark.encode() for mark in marks)]

    def encode(text: str) -> list[int]:
        for mark, token in marks.items():
            before, found, behind = text.partition(mark)
            if found:
                return [*encode(before), token, *encode(behind)]
        return WORDS_TOKENIZER.encode(text)

    return dataclasses.replace(plain, tokens=tokens, special_ids=special, encode=encode), encode


@pytest.mark.parametrize("backend_name", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(("form", "written"), CASES)
def test_a_grammar_holds_what_the_parser_takes(backend_name: str, form: str, written: str) -> None:
    if not GRAMMAR_BACKENDS[backend_name].installed:
        pytest.skip(f"{backend_name} is not installed")
    backend = GRAMMAR_BACKENDS[backend_name].make(vocabulary(), GrammarOptions())
    compiled = backend.compile(strict_grammar(USE, TOOL_FORMATS[form]))
    good = "Let me see.\n" + written.replace("ARGUMENTS", '{"a": 12}')
    assert takes(compiled.matcher(), good)
    assert takes(compiled.matcher(), good + "\n" + good)
    assert takes(compiled.matcher(), "No call at all.")
    assert calls(form, good) == ("Let me see.", [("f", '{"a": 12}')])
    assert len(calls(form, good + "\n" + good)[1]) == 2
    for arguments in ('{"a": "x"}', "{}", '{"a": 1, "b": 2}', "[]"):
        assert not takes(compiled.matcher(), written.replace("ARGUMENTS", arguments)), arguments
    for trigger in TOOL_FORMATS[form].triggers or TOOL_FORMATS[form].starts:
        assert not takes(compiled.matcher(), f"See. {trigger} and then no call")


@pytest.mark.parametrize("form", WRITTEN)
def test_marks_that_are_special_tokens_are_held_too(form: str) -> None:
    words, encode = with_marks(form)
    compiled = (
        GRAMMAR_BACKENDS["llguidance"].make(words, GrammarOptions()).compile(strict_grammar(USE, TOOL_FORMATS[form]))
    )

    def accepts(text: str) -> bool:
        matcher = compiled.matcher()
        return all(matcher.accept(token) for token in encode(text))

    good = "See. " + WRITTEN[form].replace("ARGUMENTS", '{"a": 12}')
    assert accepts(good)
    assert not accepts(WRITTEN[form].replace("ARGUMENTS", '{"a": "x"}'))
    for mark in TOOL_FORMATS[form].markers[1:]:
        assert not accepts(f"See. {mark}"), "a mark without what begins a call"


def test_special_tokens_that_a_backend_cannot_spell() -> None:
    if not GRAMMAR_BACKENDS["xgrammar"].installed:
        pytest.skip("xgrammar is not installed")
    assert not spells_special_tokens("xgrammar")
    words, encode = with_marks("deepseekv31")
    made = GRAMMAR_BACKENDS["xgrammar"].make(words, GrammarOptions())
    matcher = made.compile(strict_grammar(USE, TOOL_FORMATS["deepseekv31"])).matcher()
    assert not matcher.accept(encode("<｜tool▁calls▁begin｜>")[0])


@pytest.mark.parametrize(("form", "written"), CASES)
def test_however_an_answer_is_split_the_same_calls_are_found(form: str, written: str) -> None:
    text = f"See. {written.replace('ARGUMENTS', chr(123) + chr(125))} {written.replace('ARGUMENTS', '{}')}"
    expected = calls(form, text)
    assert len(expected[1]) == 2
    for size in (1, 3, 7):
        parser = AnswerFormat(form).parser(Wanted(tools=ParserContext(tools=USE.schemas or {}, framed=True)))
        found: list[Any] = []
        for at in range(0, len(text), size):
            found += parser.push(text[at : at + size])
        found += parser.finish()
        assert sum(type(event).__name__ == "CallEnd" for event in found) == 2


@pytest.mark.parametrize(("form", "written"), CASES)
def test_a_call_that_breaks_off_is_content(form: str, written: str) -> None:
    whole = written.replace("ARGUMENTS", '{"a": 12}')
    for length in range(1, len(whole)):
        content, found = calls(form, whole[:length])
        assert not found, whole[:length]
        assert content == whole[:length]


@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
def test_each_format_is_held_or_says_that_it_is_not(start_chat: Callable[..., ServerThread], form: str) -> None:
    server = start_chat(tool_call_parser=form, reasoning_parser="none")
    body = {"model": "tiny", "messages": [{"role": "user", "content": say("x")}], "tools": TOOLS}
    response = server.http.post("/v1/chat/completions", json=body)
    grammar = server.engine.seen[-1].sampling.grammar
    if form in HELD:
        assert "X-Cardan-Unenforced" not in response.headers
        assert grammar is not None
        assert json.loads(grammar.text)["structures"][0]["schema"] == PARAMETERS
    else:
        assert response.headers["X-Cardan-Unenforced"] == "strict"
        assert grammar is None
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        forced = server.http.post("/v1/chat/completions", json={**body, "tool_choice": choice})
        assert "X-Cardan-Unenforced" not in forced.headers
        grammar = server.engine.seen[-1].sampling.grammar
        assert grammar is not None
        assert not grammar.allow_unenforced
    unheld = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    strict = {"type": "function", "function": {"name": "f", "parameters": unheld, "strict": True}}
    refused = server.http.post("/v1/chat/completions", json={**body, "tools": [strict], "tool_choice": "required"})
    assert refused.status_code == 400
    assert "uniqueItems" in refused.json()["error"]["message"]


def test_every_api_names_what_is_not_held(start_chat: Callable[..., ServerThread]) -> None:
    server = start_chat(tool_call_parser="mistral")
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    response = server.http.post("/v1/chat/completions", json=asking("x", tools=[tool]))
    assert response.headers["X-Cardan-Unenforced"] == "strict"
    assert server.engine.seen[-1].sampling.grammar is None
    asked = {"model": "tiny", "tools": [{"type": "function", "name": "f", "strict": True}], "input": say("x")}
    with server.http.stream("POST", "/v1/responses", json={**asked, "stream": True}) as streamed:
        streamed.read()
    assert streamed.headers["X-Cardan-Unenforced"] == "strict"
    claude = {"name": "f", "input_schema": {"type": "object"}, "strict": True}
    asked = {"model": "tiny", "max_tokens": 9, "tools": [claude], "messages": [{"role": "user", "content": say("x")}]}
    assert server.http.post("/v1/messages", json=asked).headers["X-Cardan-Unenforced"] == "strict"
    for fields in ({"tool_choice": "required"}, {"tool_choice": "none"}, {"tools": [NOW]}):
        held = server.http.post("/v1/chat/completions", json=asking("x", **{"tools": [tool], **fields}))
        assert held.status_code == 200
        assert "X-Cardan-Unenforced" not in held.headers


def test_marks_that_the_backend_cannot_spell_are_named(start_chat: Callable[..., ServerThread]) -> None:
    server = start_chat(tool_call_parser="deepseekv31", reasoning_parser="none")
    info, tokenizer = server.engine.info, server.engine.tokenizer
    server.engine.info = dataclasses.replace(info, grammar_backend="xgrammar")
    body = {"model": "tiny", "messages": [{"role": "user", "content": say("x")}], "tools": TOOLS}
    assert "X-Cardan-Unenforced" not in server.http.post("/v1/chat/completions", json=body).headers
    tokenizer.token_id = lambda text: 257 if text == "<｜tool▁sep｜>" else None
    named = server.http.post("/v1/chat/completions", json=body)
    assert named.headers["X-Cardan-Unenforced"] == "strict"
    assert server.engine.seen[-1].sampling.grammar is None


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", ["deepseekv31", "hermes", "mistral"])
@pytest.mark.parametrize("backend", ["none", "acme"])
def test_without_a_backend_for_structural_tags_strict_is_named(
    start_chat: Callable[..., ServerThread], monkeypatch: pytest.MonkeyPatch, backend: str, form: str, special: bool
) -> None:
    kinds = frozenset(GrammarKind) - {GrammarKind.STRUCTURAL_TAG}
    acme = dataclasses.replace(GRAMMAR_BACKENDS["llguidance"], kinds=kinds)
    monkeypatch.setitem(GRAMMAR_BACKENDS, "acme", acme)
    server = start_chat(tool_call_parser=form, reasoning_parser="none")
    server.engine.info = dataclasses.replace(server.engine.info, grammar_backend=backend)
    if special:
        server.engine.tokenizer.token_id = lambda text: 257 if text in TOOL_FORMATS[form].markers else None
    body = {"model": "tiny", "messages": [{"role": "user", "content": say("x")}], "tools": TOOLS}
    named = server.http.post("/v1/chat/completions", json=body)
    assert (named.status_code, named.headers["X-Cardan-Unenforced"]) == (200, "strict")
    assert server.engine.seen[-1].sampling.grammar is None


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_arguments_are_objects(start_chat: Callable[..., ServerThread], choice: Any) -> None:
    server = start_chat(tool_call_parser="hermes", reasoning_parser="none")

    def ask(parameters: dict[str, Any], **fields: Any) -> Any:
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}
        body = {"model": "tiny", "messages": [{"role": "user", "content": say("x")}], "tools": [tool]}
        return server.http.post("/v1/chat/completions", json={**body, "tool_choice": choice})

    for kind in ("string", ["string", "null"], 5):
        refused = ask({"type": kind}, strict=True)
        assert refused.status_code == 400
        assert "arguments are always an object" in refused.json()["error"]["message"]
        assert ask({"type": kind}).status_code == (200 if choice == "auto" else 400)
    assert ask({"type": ["object", "null"]}, strict=True).status_code == 200
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert '"object"' in grammar.text
    assert '"null"' not in grammar.text


def test_calls_behind_reasoning_that_is_left_in_the_content(start_chat: Callable[..., ServerThread]) -> None:
    server = start_chat(tool_call_parser="hermes", reasoning_parser="qwen3")
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    whole = {"extra_body": {"separate_reasoning": False}}
    held = asking(f"<think>Hm.</think>See. {PARIS}", tools=[strict, NOW], **whole)
    forced = asking('<think>Hm.</think>[{"name": "now", "arguments": {}}]', tool_choice="required", **whole)
    with server.openai() as api:
        for stream in (False, True):
            assert _said(api, held, stream) == ("<think>Hm.</think>See.", ["get_weather"])
            assert _said(api, forced, stream) == ("<think>Hm.</think>", ["now"])


def test_what_begins_calls_is_made_once_and_beside_the_event_loop(
    start_chat: Callable[..., ServerThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_chat(tool_call_parser="hermes", reasoning_parser="none")
    made: list[threading.Thread] = []

    def note(texts: Any) -> Markers:
        made.append(threading.current_thread())
        return Markers(texts)

    monkeypatch.setattr(json_calls, "Markers", note)
    tool = {"type": "function", "function": {"name": "only_called_here", "strict": True}}
    assert server.http.post("/v1/chat/completions", json=asking("x", tools=[tool], n=4)).status_code == 200
    (thread,) = made
    assert thread is not server.call(_own_thread())


async def _own_thread() -> threading.Thread:
    return threading.current_thread()


def test_the_end_of_reasoning_is_seen_where_it_is_a_special_token(start_chat: Callable[..., ServerThread]) -> None:
    server = start_chat(tool_call_parser="hermes", reasoning_parser="qwen3")
    server.engine.tokenizer.token_id = {"<think>": 257, "</think>": 258}.get
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    body = asking("<think>Hm.</think>See.", tools=[strict], separate_reasoning=False)
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    assert server.engine.seen[-1].sampling.shown_special_ids == (257, 258)
    plain = asking("<think>Hm.</think>See.", separate_reasoning=False)
    assert server.http.post("/v1/chat/completions", json=plain).status_code == 200
    assert server.engine.seen[-1].sampling.shown_special_ids == ()


def _said(api: openai.OpenAI, asked: dict[str, Any], stream: bool) -> tuple[str, list[str | None]]:
    if not stream:
        message = api.chat.completions.create(**asked).choices[0].message
        return message.content or "", [call.function.name for call in message.tool_calls or []]
    deltas = [chunk.choices[0].delta for chunk in api.chat.completions.create(**asked, stream=True)]
    named = [call.function.name for delta in deltas for call in delta.tool_calls or [] if call.function.name]
    return "".join(delta.content or "" for delta in deltas), named
