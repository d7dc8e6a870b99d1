"""Formats whose calls are JSON objects, on samples that are split in every way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from splits import Sample, check_sample

from cardan.parsers import AnswerFormat, ParserContext, Wanted, read_answer

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
    *(
        Sample(text, content=text)
        for text in (
            '<tool_call>{"name": "get_weather", "arguments": {"days": 1e999}}</tool_call>',
            '<tool_call>{"name": "get_weather", "arguments": {"days": -%s}}</tool_call>' % ("9" * 400),
            '<tool_call>{"name": "get_weather", "arguments": {"city": "\\ud800"}}</tool_call>',
            '<tool_call>{"name": "get_weather", "arguments": {"city": "\\ud800\\u0041"}}</tool_call>',
            '<tool_call>{"name": "get_weather", "arguments": {"city": "\\uDFFF\\uD800"}}</tool_call>',
            '<tool_call>{"name": "get_weather", "id": "\\udc00", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "get_weather", "arguments": "{\\"days\\": 1e999}"}</tool_call>',
            '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"\\\\ud800\\"}"}</tool_call>',
        )
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
    Sample('{"name": "now", "arguments": {}}', calls=(("now", {}),)),
    Sample(
        '```json\n{\n  "name": "get_weather",\n  "arguments": {\n    "city": "Rome"\n  }\n}\n```\n',
        calls=(("get_weather", {"city": "Rome"}),),
    ),
    Sample(
        '{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {}}\n\nDone',
        content="\n\nDone",
        calls=(("now", {}), ("now", {})),
    ),
    Sample('```json\n{"name": "Bob", "arguments": 5}\n```', content='```json\n{"name": "Bob", "arguments": 5}\n```'),
    Sample("```python\nprint()\n```", content="```python\nprint()\n```"),
    Sample(' {"name": "now"', content=' {"name": "now"'),
    Sample('See {"name": "now", "arguments": {}}', content='See {"name": "now", "arguments": {}}'),
    Sample("a <tool_ca", content="a <tool_ca"),
    Sample("", content=""),
]


@pytest.mark.parametrize("name", ["hermes", "qwen25"])
@pytest.mark.parametrize("sample", HERMES, ids=lambda sample: sample.text[:40])
def test_hermes(name: str, sample: Sample) -> None:
    check_sample(AnswerFormat(tool_parser=name), sample)


LLAMA = [
    Sample("Hello {world}", content="Hello {world}"),
    Sample('{"name": "get_weather", "parameters": {"city": "Oslo"}}', calls=(("get_weather", {"city": "Oslo"}),)),
    Sample(
        '\n{"name": "now", "parameters": {}}; {"type": "function", "name": "get_weather", "parameters": {"days": 1}}\n',
        calls=(("now", {}), ("get_weather", {"days": 1})),
    ),
    Sample(
        'One moment. <|python_tag|>{"name": "get_weather", "arguments": {"city": "Ålesund"}}',
        content="One moment.",
        calls=(("get_weather", {"city": "Ålesund"}),),
    ),
    Sample('{"answer": 42, "name": "now"}', content='{"answer": 42, "name": "now"}'),
    Sample('{"name": "Bob", "parameters": {}}', content='{"name": "Bob", "parameters": {}}'),
    Sample('{"name": "now", "parameters": {', content='{"name": "now", "parameters": {'),
    Sample('{"name": "now", "parameters": {}}; and so', content="; and so", calls=(("now", {}),)),
    Sample('<|python_tag|>search.call(query="x")', content='<|python_tag|>search.call(query="x")'),
    Sample("  {", content="  {"),
    Sample("", content=""),
]


@pytest.mark.parametrize("sample", LLAMA, ids=lambda sample: sample.text[:40])
def test_llama3(sample: Sample) -> None:
    check_sample(AnswerFormat("llama3"), sample)


MISTRAL = [
    Sample("A [TOOL] is not a call.", content="A [TOOL] is not a call."),
    Sample(
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Nîmes", "tags": ["a]", "[b"]}}, '
        '{"name": "now", "arguments": {}, "id": "abcdefghi"}]',
        calls=(("get_weather", {"city": "Nîmes", "tags": ["a]", "[b"]}), ("now", {})),
    ),
    Sample(
        'Yes.[TOOL_CALLS]get_weather[ARGS]{"city": "Nice"}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}',
        content="Yes.",
        calls=(("get_weather", {"city": "Nice"}), ("now", {})),
        ids=("id0", "123456789"),
    ),
    Sample('[TOOL_CALLS]get_weather{"city": "Nice"}', calls=(("get_weather", {"city": "Nice"}),)),
    Sample('[TOOL_CALLS] [{"name": "now", "arguments": {}}', calls=(("now", {}),)),
    Sample('[TOOL_CALLS]launch[ARGS]{"a": 1} end', content='[TOOL_CALLS]launch[ARGS]{"a": 1} end'),
    Sample('[TOOL_CALLS]now[ARGS]{"a": ', content='[TOOL_CALLS]now[ARGS]{"a": '),
    Sample("[TOOL_CALLS]now[ARGS] [1]", content="[TOOL_CALLS]now[ARGS] [1]"),
    Sample(
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "launch"}]',
        content=', {"name": "launch"}]',
        calls=(("now", {}),),
    ),
]


@pytest.mark.parametrize("sample", MISTRAL, ids=lambda sample: sample.text[:40])
def test_mistral(sample: Sample) -> None:
    if 'launch"}]' in sample.text:
        sample = Sample(sample.text, ', {"name": "launch"}]', sample.calls)
    check_sample(AnswerFormat("mistral"), sample)


def _deepseek(*calls: str) -> str:
    return "<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>"


def _v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def _v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


@pytest.mark.parametrize(("form", "call"), [("deepseekv3", _v3), ("deepseekv31", _v31)])
def test_deepseek(form: str, call: Callable[[str, str], str]) -> None:
    one, two = call("get_weather", '{"city": "東京 ```"}'), call("now", "{}")
    bad = call("launch", "{}")
    parsed = (("get_weather", {"city": "東京 ```"}), ("now", {}))
    samples = [
        Sample("No <｜tool calls.", content="No <｜tool calls."),
        Sample(_deepseek(one), calls=parsed[:1]),
        Sample(f"First.\n\n{_deepseek(one, two)}", content="First.", calls=parsed),
        Sample(f"{_deepseek(one)} Then {_deepseek(two)} end.", content=" Then end.", calls=parsed),
        Sample(one, calls=parsed[:1]),
        Sample(_deepseek(bad), content=_deepseek(bad)),
        Sample(f"a {_deepseek(one)[:60]}", content=f"a {_deepseek(one)[:60]}"),
        Sample("<｜tool▁calls▁begin｜>", content="<｜tool▁calls▁begin｜>"),
    ]
    for sample in samples:
        check_sample(AnswerFormat(form), sample)


KIMI = [
    Sample("Words <|tool", content="Words <|tool"),
    Sample(
        "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "北京"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        content="Sure.",
        calls=(("get_weather", {"city": "北京"}), ("now", {})),
        ids=("functions.get_weather:0", "functions.now:1"),
    ),
    Sample(
        "<|tool_calls_section_begin|>\n<|tool_call_begin|>\nfunctions.now:0<|tool_call_argument_begin|>\n{}\n"
        "<|tool_call_end|>\n<|tool_calls_section_end|>\n",
        calls=(("now", {}),),
        ids=("functions.now:0",),
    ),
    Sample(
        "<|tool_call_begin|>now:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_call_begin|>now:3<|tool_call_argument_begin|>{}<|tool_call_end|>",
        calls=(("now", {}), ("now", {})),
        ids=("now:3", "id0"),
    ),
    Sample(
        "<|tool_call_begin|>write.file-2<|tool_call_argument_begin|>{}<|tool_call_end|>",
        calls=(("write.file-2", {}),),
        ids=("id0",),
    ),
    Sample(
        "<|tool_call_begin|>functions.launch:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        content="<|tool_call_begin|>functions.launch:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ),
    Sample(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_arg",
        content="<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_arg",
    ),
]


@pytest.mark.parametrize("sample", KIMI, ids=lambda sample: sample.text[:40])
def test_kimi_k2(sample: Sample) -> None:
    check_sample(AnswerFormat("kimi_k2"), sample)


def test_calls_that_leak_into_reasoning_end_it() -> None:
    text = (
        "I should look. <|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    check_sample(
        AnswerFormat("kimi_k2", "kimi_k2"),
        Sample(text, reasoning="I should look.", calls=(("now", {}),)),
        prompt="<think>",
    )


def test_without_declared_functions_a_json_answer_is_one() -> None:
    text = '{"name": "Bob", "arguments": {}}'
    answer = read_answer(AnswerFormat("hermes").parser(Wanted(tools=ParserContext())), text)
    assert answer.content == text
    assert read_answer(AnswerFormat("hermes").parser(Wanted(tools=ParserContext())), f"<tool_call>{text}").calls


FORCED = [
    Sample('[{"name": "now", "arguments": {}}]', calls=(("now", {}),)),
    Sample(
        ' [ {"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "x"}} ] ',
        calls=(("now", {}), ("get_weather", {"city": "x"})),
    ),
    Sample('{"name": "now", "arguments": {"a": [1]}}', calls=(("now", {"a": [1]}),)),
    Sample('[{"name": "now", "argu', content='[{"name": "now", "argu'),
    Sample("[]", content="[]"),
]


@pytest.mark.parametrize("sample", FORCED, ids=lambda sample: sample.text[:40])
def test_forced_calls(sample: Sample) -> None:
    for form in (AnswerFormat("mistral"), AnswerFormat(), AnswerFormat("gpt-oss", "gpt-oss")):
        check_sample(form, sample, forced=True)
