"""Formats whose arguments stand between tags, on samples that are split in every way."""

from __future__ import annotations

import pytest
from splits import Sample, check_sample

from cardan.parsers import AnswerFormat

CODE = "def f(x):\n\treturn \"<b>\" if x < 1 else '\\n'  # ünï 😀"

QWEN = [
    Sample("a < b, <function> is a word", content="a < b, <function> is a word"),
    Sample(
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=celsius>\nTrue\n</parameter>\n</function>\n</tool_call>",
        calls=(("get_weather", {"city": "Paris", "days": 3, "celsius": True}),),
    ),
    Sample(
        "I look.\n\n<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=write.file-2>\n"
        f"<parameter=text>\n{CODE}\n\n</parameter>\n</function>\n</tool_call>\nDone",
        content="I look.\nDone",
        calls=(("now", {}), ("write.file-2", {"text": CODE + "\n"})),
    ),
    Sample(
        '<function=get_weather><parameter=place>{"lat": 1.5}</parameter><parameter=tags>[\'a\', "b"]</parameter>'
        "<parameter=unknown>12</parameter></function>",
        calls=(("get_weather", {"place": {"lat": 1.5}, "tags": ["a", "b"], "unknown": 12}),),
    ),
    Sample(
        "<tool_call>\n<function=launch>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        content="<tool_call>\n<function=launch>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    ),
    Sample(
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        content="<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
    ),
    Sample(
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n",
        content="<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n",
    ),
    Sample(
        "<function=get_weather><parameter=city>a</parameter><parameter=city>b</parameter></function>",
        content="<function=get_weather><parameter=city>a</parameter><parameter=city>b</parameter></function>",
    ),
    Sample(
        "<function=get_weather>words</function> <function=now></function>",
        content="<function=get_weather>words</function>",
        calls=(("now", {}),),
    ),
    Sample("<function=get_weather><parameter=\n>", content="<function=get_weather><parameter=\n>"),
]


@pytest.mark.parametrize("sample", QWEN, ids=lambda sample: sample.text[:40])
def test_qwen3_coder(sample: Sample) -> None:
    check_sample(AnswerFormat("qwen3_coder"), sample)


GLM = [
    Sample("Words.", content="Words."),
    Sample(
        "Let me.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris\n</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        content="Let me.",
        calls=(("get_weather", {"city": "Paris\n", "days": 2}),),
    ),
    Sample(
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>5</arg_value><arg_key>tags</arg_key>"
        '<arg_value>["x", "y</arg_key>"]</arg_value></tool_call><tool_call>now</tool_call>',
        calls=(("get_weather", {"city": "5", "tags": ["x", "y</arg_key>"]}), ("now", {})),
    ),
    Sample("<tool_call>launch\n</tool_call>", content="<tool_call>launch\n</tool_call>"),
    Sample(
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n",
        content="<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n",
    ),
    Sample("<tool_call>now\nwords</tool_call>", content="<tool_call>now\nwords</tool_call>"),
    Sample(
        "<tool_call>now\n<arg_key>a</arg_key>b</tool_call>",
        content="<tool_call>now\n<arg_key>a</arg_key>b</tool_call>",
    ),
]


@pytest.mark.parametrize("sample", GLM, ids=lambda sample: sample.text[:40])
def test_glm45(sample: Sample) -> None:
    check_sample(AnswerFormat("glm45"), sample)


MINIMAX = [
    Sample('<invoke name="now"> alone is no call', content='<invoke name="now"> alone is no call'),
    Sample(
        'So.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Łódź</parameter>\n'
        '<parameter name="place">{"lat": 2}</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>\n",
        content="So.",
        calls=(("get_weather", {"city": "Łódź", "place": {"lat": 2}}), ("now", {})),
    ),
    Sample(
        '<minimax:tool_call><invoke name="now"><parameter name="a">x',
        content='<minimax:tool_call><invoke name="now"><parameter name="a">x',
    ),
    Sample(
        '<minimax:tool_call><invoke name="launch"></invoke></minimax:tool_call>',
        content='<minimax:tool_call><invoke name="launch"></invoke></minimax:tool_call>',
    ),
    Sample("<minimax:tool_call>nothing", content="<minimax:tool_call>nothing"),
]


@pytest.mark.parametrize("sample", MINIMAX, ids=lambda sample: sample.text[:40])
def test_minimax(sample: Sample) -> None:
    check_sample(AnswerFormat("minimax"), sample)


def _step(inner: str) -> str:
    return f"<｜tool_call_begin｜>function<｜tool_sep｜>{inner}<｜tool_call_end｜>"


_PARIS = (
    '<steptml:invoke name="get_weather">\n<steptml:parameter name="city">Paris</steptml:parameter>\n'
    '<steptml:parameter name="days">7</steptml:parameter>\n</steptml:invoke>'
)
_NOW = '<steptml:invoke name="now">\n</steptml:invoke>'
_CALLS = (("get_weather", {"city": "Paris", "days": 7}), ("now", {}))
STEP = [
    Sample("Words.", content="Words."),
    Sample(
        f"Fine.\n<｜tool_calls_begin｜>\n{_step(_PARIS)}\n{_step(_NOW)}\n<｜tool_calls_end｜>",
        content="Fine.",
        calls=_CALLS,
    ),
    Sample(
        f"<｜tool_calls_begin｜><｜tool_call_begin｜>{_PARIS}<｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜>"
        f"{_NOW}<｜tool_call_end｜><｜tool_calls_end｜> end",
        content=" end",
        calls=_CALLS,
    ),
    Sample(f"<｜tool_calls_begin｜>{_PARIS}", content=f"<｜tool_calls_begin｜>{_PARIS}"),
    Sample(_step(_PARIS)[:100], content=_step(_PARIS)[:100]),
]


@pytest.mark.parametrize("sample", STEP, ids=lambda sample: sample.text[:40])
def test_step3(sample: Sample) -> None:
    check_sample(AnswerFormat("step3"), sample)
