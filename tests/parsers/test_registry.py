"""Formats by name, and how they are found in chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from splits import check_all_splits

from cardan.errors import ConfigError
from cardan.parsers import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerFormat,
    Content,
    ParserContext,
    Wanted,
    choose_parsers,
)
from cardan.parsers.base import CallParser, read_tools
from cardan.parsers.source import MAX_SPACES, Markers

QWEN3 = Path("qwen3tok/package/models/tokenizer_config.json")

DEEPSEEK_TURN = "{{'<｜Assistant｜>'}}{% if '</think>' in content %}{% endif %}"
SNIPPETS: list[tuple[str, str | None, str | None]] = [
    ("{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}", None, None),
    ("<tool_call>\n{}\n</tool_call>", "hermes", None),
    ("<tool_call> <think> </think> {% if enable_thinking is defined %}", "hermes", "qwen3"),
    ("<|im_start|>assistant\n<think>\n {{ x.split('</think>') }} <tool_call>", "hermes", "qwen3-thinking"),
    ("<tool_call>\n<function=example><parameter=a>", "qwen3_coder", None),
    ('<|start_header_id|> {"name": function name, "parameters": dictionary}', "llama3", None),
    ("<|python_start|>[func_name1(params)]<|python_end|>", "pythonic", None),
    ("[INST] [TOOL_CALLS]", "mistral", None),
    (DEEPSEEK_TURN + "<｜tool▁calls▁begin｜>function\n```json", "deepseekv3", "deepseek-r1"),
    (DEEPSEEK_TURN + "<｜tool▁calls▁begin｜>{% if thinking %}", "deepseekv31", "deepseek-v3"),
    ("<|tool_calls_section_begin|>", "kimi_k2", None),
    ("<|tool_calls_section_begin|><think></think>", "kimi_k2", "kimi_k2"),
    ("◁think▷", None, "kimi"),
    ("<tool_call>{name}\n<arg_key></arg_key> <think></think> enable_thinking", "glm45", "glm45"),
    ("<|start|>assistant<|channel|>final<|message|> <|constrain|>json", "gpt-oss", "gpt-oss"),
    ("<minimax:tool_call> <think> </think>", "minimax", "minimax"),
    ('<｜tool_calls_begin｜><steptml:invoke name=""> <think></think>', "step3", "step3"),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), SNIPPETS, ids=[f"{s[1]}-{s[2]}" for s in SNIPPETS])
def test_templates_show_their_format(template: str, tools: str | None, reasoning: str | None) -> None:
    assert choose_parsers("auto", "auto", [template]) == (tools, reasoning)
    assert choose_parsers("none", "none", [template]) == (None, None)


def test_every_format_is_found_or_has_another_name() -> None:
    assert {snippet[1] for snippet in SNIPPETS} - {None} == set(TOOL_FORMATS) - {"qwen25"}
    assert {snippet[2] for snippet in SNIPPETS} - {None} == set(REASONING_FORMATS)


def test_names_go_before_templates() -> None:
    assert choose_parsers("mistral", "kimi", [SNIPPETS[2][0]]) == ("mistral", "kimi")


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"--tool-call-parser is 'x', expected auto, none, or one of deepseekv3"):
        choose_parsers("x", "none", [])
    with pytest.raises(ConfigError, match=r"cannot go together: the format gpt-oss is of whole answers"):
        choose_parsers("gpt-oss", "qwen3", [])
    assert choose_parsers("gpt-oss", "none", []) == ("gpt-oss", None)


@pytest.mark.model
def test_the_template_of_qwen3(models_path: Path) -> None:
    template = json.loads((models_path / QWEN3).read_text())["chat_template"]
    assert choose_parsers("auto", "auto", [template]) == ("hermes", "qwen3")


def test_mistral_wants_short_ids() -> None:
    ids = {TOOL_FORMATS["mistral"].new_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


def test_where_answers_begin() -> None:
    r1, qwen3 = REASONING_FORMATS["deepseek-r1"], REASONING_FORMATS["qwen3"]
    for prompt, by_r1, by_qwen3 in (
        ("x", True, False),
        ("x<think>\n", True, True),
        ("x<think>\n</think>\n", False, False),
    ):
        assert r1.begins_open(prompt) is by_r1
        assert qwen3.begins_open(prompt) is by_qwen3


def test_what_must_be_seen() -> None:
    form, tools = AnswerFormat("mistral", "qwen3"), ParserContext()
    assert form.markers(Wanted(tools=tools)) == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>"}
    assert form.markers(Wanted(reasoning=False)) == frozenset()
    assert form.markers(Wanted(reasoning=False, reasons_first=True)) == {"<think>", "</think>"}
    assert "<|channel|>" in AnswerFormat("gpt-oss", "gpt-oss").markers(Wanted(reasoning=False))
    assert str(AnswerFormat("mistral")) == "tool calls as mistral, reasoning as none"


def test_declared_tools() -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}, {"name": "g"}]
    assert read_tools(tools) == {"f": {"a": 1}, "g": {}}


def test_markers_that_hold_each_other_are_refused() -> None:
    for texts in (["<a>", "<a>b"], ["a<b>", "<b>"], ["x<b>x", "<b>"], ["a", ""], [""]):
        with pytest.raises(ValueError, match="is empty or part of another"):
            Markers(texts)


def test_what_begins_calls_is_made_once_for_all_choices() -> None:
    names = [f"function_{number}" for number in range(1024)]
    form = AnswerFormat("hermes")

    def parser() -> CallParser:
        parser = form.parser(Wanted(tools=ParserContext(tools={name: {} for name in names}, framed=True)))
        assert isinstance(parser, CallParser)
        return parser

    first = parser()
    assert len(first.starts.texts) == 1024
    assert parser().starts is first.starts
    names.append("another")
    assert len(parser().starts.texts) == 1025


@pytest.mark.parametrize("count", [MAX_SPACES - 1, MAX_SPACES, MAX_SPACES + 1, 3 * MAX_SPACES])
def test_white_space_is_held_back_within_bounds(count: int) -> None:
    text = "a" + " " * count + '<tool_call>{"name": "f"}</tool_call>'
    form, wanted = AnswerFormat("hermes"), Wanted(tools=ParserContext(tools={"f": {}}, new_id=lambda: "id"))
    answer = check_all_splits(lambda: form.parser(wanted), text)
    assert answer.content == "a" + " " * max(0, count - MAX_SPACES)
    parser = form.parser(wanted)
    assert parser.push("a") == [Content("a")]
    said = [event for _ in range(count) for event in parser.push(" ")]
    assert sum(len(event.text) for event in said if isinstance(event, Content)) == max(0, count - MAX_SPACES)
