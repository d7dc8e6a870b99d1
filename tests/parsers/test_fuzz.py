"""Answers of random words and pieces of markers: no format fails on them, loses words, or depends on splits."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import TOOLS, context, feed, joined

from cardan.parsers import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Answer,
    AnswerFormat,
    CallStart,
    Content,
    Reasoning,
    Wanted,
    read_answer,
)

FRAGMENTS = [
    *sorted({marker for kind in TOOL_FORMATS.values() for marker in kind.markers}),
    *("<function=", "<parameter=", "</parameter>", "</function>", "<invoke name=", "</invoke>", ">", '">', "<", "</"),
    *('<parameter name="', '<steptml:invoke name="', '<steptml:parameter name="', "</steptml:parameter>"),
    *("</steptml:invoke>", "functions.", ":0", " to=functions.", "analysis", "commentary", "final", "function"),
    *TOOLS,
    *('{"name": "now", "arguments": {', '"name"', '"arguments"', '"parameters"', "city", '"', "'", "\\", "\\u00", ":"),
    *("{", "}", "[", "]", "(", ")", "=", ",", ", ", ";", "\n", " ", "1", "-2.5e3", "true", "null", "None", "```json"),
    *("<think>", "</think>", "◁think▷", "◁/think▷", "words", "ü", "😀", "\t", "\x00", "{}", '{"city": "x"}'),
]

CALLS = {
    "hermes": '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "qwen3_coder": "<tool_call><function=get_weather><parameter=days>5</parameter></function></tool_call>",
    "llama3": '<|python_tag|>{"name": "now", "parameters": {"a": [1]}}',
    "pythonic": "[get_weather(city='x', days=2)]",
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {"a": "b"}}]',
    "deepseekv3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
    "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "kimi_k2": "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "gpt-oss": "<|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>",
    "minimax": '<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>',
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="now"></steptml:invoke>',
}
"""A call as each format writes it."""


def texts(call: str) -> st.SearchStrategy[str]:
    fragment = st.one_of(st.just(call), st.sampled_from(FRAGMENTS), st.text(max_size=3))
    return st.lists(fragment, max_size=14).map("".join)


def kept_words(text: str) -> Counter[str]:
    return Counter(character for character in text if character.isalnum())


@st.composite
def split_texts(draw: st.DrawFn, call: str) -> list[str]:
    text = draw(texts(call))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]


FORMS = [AnswerFormat(name, None) for name in TOOL_FORMATS if name not in ("qwen25",)]
FORMS += [AnswerFormat("hermes", name) for name, kind in REASONING_FORMATS.items() if kind.build is None]
FORMS += [AnswerFormat("gpt-oss", "gpt-oss")]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.tool_parser}-{form.reasoning_parser}")
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_text(form: AnswerFormat, data: st.DataObject) -> None:
    pieces = data.draw(split_texts(CALLS[form.tool_parser or ""]))
    text = "".join(pieces)
    events = joined(feed(form.parser(Wanted(tools=context())), pieces))
    assert events == joined(feed(form.parser(Wanted(tools=context())), [text]))
    assert events == joined(feed(form.parser(Wanted(tools=context())), text))
    answer = Answer()
    answer.add(events)
    assert not answer.unfinished
    for call in answer.calls.values():
        assert call.name in TOOLS
        assert isinstance(json.loads(call.arguments), dict)
        call.arguments.encode()
    words = "".join(event.text for event in events if isinstance(event, Content | Reasoning))
    assert not kept_words(words) - kept_words(text), "words were made up"
    if not any(isinstance(event, CallStart) for event in events) and form.tool_parser != "gpt-oss":
        for tag in ("<think>", "</think>", "◁think▷", "◁/think▷") if form.reasoning_parser else ():
            text, words = text.replace(tag, ""), words.replace(tag, "")
        assert "".join(words.split()) == "".join(text.split()), "words were lost"


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@settings(max_examples=25, deadline=None)
@given(text=st.text(alphabet=st.characters(categories=["L", "N", "Zs", "Po"]), max_size=60))
def test_words_without_markers_come_through_unchanged(name: str, text: str) -> None:
    answer = Answer()
    answer.add(feed(AnswerFormat(name).parser(Wanted(tools=context())), text))
    assert answer.content == text
    assert not answer.calls


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call> "),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {'),
        ("pythonic", "["),
        ("pythonic", "[get_weather(city=["),
        ("mistral", "[TOOL_CALLS]["),
        ("mistral", '[TOOL_CALLS] {"name":'),
        ("kimi_k2", "<|tool_call_begin|>"),
        ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>"),
        ("glm45", "<tool_call>get_weather<arg_key>city</arg_key>"),
        ("llama3", "<|python_tag|>{"),
        ("deepseekv3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"),
    ],
)
def test_calls_that_all_break_off_cost_no_more_than_their_length(name: str, piece: str) -> None:
    """Four times the text takes four times as long, not sixteen times."""
    once_s = min(_reading_s(name, piece * 2_000) for _ in range(2))
    many_s = min(_reading_s(name, piece * 8_000) for _ in range(2))
    assert many_s < 8 * max(once_s, 0.01)


def _reading_s(name: str, text: str) -> float:
    """Seconds of the processor that an answer takes to be read."""
    started_s = time.process_time()
    answer = read_answer(AnswerFormat(name).parser(Wanted(tools=context())), text)
    taken_s = time.process_time() - started_s
    assert not answer.unfinished
    return taken_s


@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_calls_above_are_calls(name: str) -> None:
    answer = Answer()
    answer.add(feed(AnswerFormat(name).parser(Wanted(tools=context())), [CALLS[name]]))
    assert len(answer.calls) == 1
    assert answer.content == ""
