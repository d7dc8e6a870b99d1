"""docs/tools-and-reasoning.md, held to the code: every name is there, and what it shows of a format is one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cardan.errors import ConfigError
from cardan.parsers import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat, ParserContext, Wanted, read_answer
from cardan.parsers.registry import choose_parsers

PAGE = (Path(__file__).parents[2] / "docs" / "tools-and-reasoning.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Cells of the table under a heading."""
    table = PAGE.partition(f"| `{heading}` |")[2].partition("\n\n")[0]
    lines = [line.replace("\\|", "\0") for line in table.splitlines()[2:]]
    return [[cell.strip().replace("\0", "|") for cell in line.strip("|").split("|")] for line in lines]


def test_every_name_is_there() -> None:
    for heading, known in (("--tool-call-parser", TOOL_FORMATS), ("--reasoning-parser", REASONING_FORMATS)):
        named = {name for row in rows(heading) for name in re.findall(r"`([^`]+)`", row[0])}
        assert named == set(known)


EXAMPLES = [
    (name, example)
    for row in rows("--tool-call-parser")
    for name in re.findall(r"`([^`]+)`", row[0])
    for example in re.findall(r"`([^`]+)`", row[2])
    if "1" in example and "a" in example
]


def test_most_formats_have_an_example() -> None:
    assert len({name for name, _ in EXAMPLES}) >= len(TOOL_FORMATS) - 3


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_examples_are_calls(name: str, example: str) -> None:
    tools = {"f": {"properties": {"a": {"type": "integer"}}}, "g": {}}
    answer = read_answer(AnswerFormat(name).parser(Wanted(tools=ParserContext(tools=tools))), example)
    call = answer.calls[0]
    assert (call.name, json.loads(call.arguments)) == ("f", {"a": 1})
    assert answer.content == ""


def test_examples_of_texts_that_exist_already() -> None:
    asked = 'Hm. <tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert json.dumps(asked)[1:-1] in PAGE
    answer = read_answer(AnswerFormat("hermes").parser(Wanted(tools=ParserContext())), asked)
    shown = {"normal_text": answer.content, "calls": [{"tool_index": 0, "name": "now", "parameters": "{}"}]}
    assert json.dumps(shown, separators=(",", ":")) in PAGE


def test_what_goes_together_with_whole_answers() -> None:
    assert "beside it the other flag may only be `gpt-oss` too, or `none`" in PAGE
    assert choose_parsers("gpt-oss", "none", ()) == ("gpt-oss", None)
    assert choose_parsers("none", "gpt-oss", ()) == (None, "gpt-oss")
    for flags in (("gpt-oss", "qwen3"), ("hermes", "gpt-oss")):
        with pytest.raises(ConfigError, match="cannot go together"):
            choose_parsers(*flags, ())


def test_the_formats_that_can_be_strict() -> None:
    can = sorted(name for name, kind in TOOL_FORMATS.items() if kind.frames is not None)
    said = " ".join(PAGE.split()).partition("held to its schema under `auto` as well, where the format is ")[2]
    assert sorted(re.findall(r"`(\w+)`", said.partition(":")[0])) == can
