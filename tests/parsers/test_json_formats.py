"""Formats whose calls are JSON objects, on samples that are split in every way."""

from __future__ import annotations

import pytest
from splits import Sample, check_sample

from cardan.parsers import AnswerFormat

HERMES = [
    Sample("Just words, 1 < 2 and <b>bold</b>.\n", content="Just words, 1 < 2 and <b>bold</b>.\n"),
    Sample(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        calls=(("get_weather", {"city": "Paris"}),),
    ),
    Sample(
        'Let me look.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>\nDone.',
        content="Let me look.\nDone.",
        calls=(("now", {}), ("get_weather", {"city": "Köln", "days": 2})),
    ),
    Sample(
        '<tool_call>{"name": "get_weather", "arguments": {"city": "\\"Zü\\u0072ich\\" \\ud83d\\ude00 😀 </tool_call>", '
        '"place": {"lat": -1.5e3, "more": [[], {}, [null, true, false]]}, "tags": ["a\\\\", "\\n"]}}</tool_call>',
        calls=(
            (
                "get_weather",
                {
                    "city": '"Zürich" 😀 😀 </tool_call>',
                    "place": {"lat": -1500.0, "more": [[], {}, [None, True, False]]},
                    "tags": ["a\\", "\n"],
                },
            ),
        ),
    ),
    Sample(
        '<tool_call>{"arguments": {"city": "Rome"}, "name": "get_weather"}</tool_call>',
        calls=(("get_weather", {"city": "Rome"}),),
    ),
    Sample(
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>',
        calls=(("get_weather", {"city": "Rome"}),),
    ),
    Sample('<tool_call>{"name": "now", "arguments": null}</tool_call>', calls=(("now", {}),)),
    Sample('<tool_call>{"name": "now"}</tool_call>', calls=(("now", {}),)),
    Sample('<tool_call>{"name": "now", "arguments": {}}', calls=(("now", {}),)),
    Sample(
        '<tool_call>{"name": "get_weather", "arguments": {"city": "two\nlines\tand a tab"}}</tool_call>',
        calls=(("get_weather", {"city": "two\nlines\tand a tab"}),),
    ),
    Sample(
        'One <tool_call>{"name": "launch", "arguments": {"at": 5}}</tool_call> two',
        content='One <tool_call>{"name": "launch", "arguments": {"at": 5}}</tool_call> two',
    ),
    Sample(
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Par',
        content='<tool_call>{"name": "get_weather", "arguments": {"city": "Par',
    ),
    Sample(
        '<tool_call>{"name": "get_weather", "arguments": {"city": Paris}}</tool_call> so',
        content='<tool_call>{"name": "get_weather", "arguments": {"city": Paris}}</tool_call> so',
    ),
    Sample(
        '<tool_call>oops <tool_call>{"name": "now", "arguments": {}}</tool_call>',
        content="<tool_call>oops",
        calls=(("now", {}),),
    ),
    Sample(
        '<tool_call>{"name": "now", "arguments": {}}</tool_call><tool_call>{"name": "now", "argu',
        content='<tool_call>{"name": "now", "argu',
        calls=(("now", {}),),
    ),
    Sample(
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
    ),
    Sample(
        '<tool_call>{"name": "now", "arguments": "no"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "no"}</tool_call>',
    ),
    Sample('<tool_call>{"name": "now", "extra": 1}</tool_call>', '<tool_call>{"name": "now", "extra": 1}</tool_call>'),
    Sample("<tool_call>", content="<tool_call>"),
    Sample("a <tool_ca", content="a <tool_ca"),
    Sample("", content=""),
]


@pytest.mark.parametrize("name", ["hermes", "qwen25"])
@pytest.mark.parametrize("sample", HERMES, ids=lambda sample: sample.text[:40])
def test_hermes(name: str, sample: Sample) -> None:
    check_sample(AnswerFormat(tool_parser=name), sample)
