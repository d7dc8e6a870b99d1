"""Calls written as Python, and the harmony format, on samples that are split in every way."""

from __future__ import annotations

import json

import pytest
from splits import Sample, check_all_splits, check_sample, context

from cardan.parsers import AnswerFormat, ParserContext, Wanted

PYTHONIC = [
    Sample("A [link](x) and [1, 2].", content="A [link](x) and [1, 2]."),
    Sample('[get_weather(city="Paris", days=2)]', calls=(("get_weather", {"city": "Paris", "days": 2}),)),
    Sample(
        "So: [now(), get_weather(city='Zür\\u0069ch \"a\" \\'b\\' ](', place={'lat': -1.5, 'deep': [{}, (1,)]}, "
        "celsius=True, tags=['a', \"b\"])] done",
        content="So: done",
        calls=(
            ("now", {}),
            (
                "get_weather",
                {
                    "city": "Zürich \"a\" 'b' ](",
                    "place": {"lat": -1.5, "deep": [{}, [1]]},
                    "celsius": True,
                    "tags": ["a", "b"],
                },
            ),
        ),
    ),
    Sample(
        '<|python_start|>[get_weather(city="""two\nlines""", days=null, celsius=false)]<|python_end|>',
        calls=(("get_weather", {"city": "two\nlines", "days": None, "celsius": False}),),
    ),
    Sample("[write.file-2(text='a\nb \\d')]", calls=(("write.file-2", {"text": "a\nb \\d"}),)),
    Sample("[launch(at=5)] and [now()]", content="[launch(at=5)] and", calls=(("now", {}),)),
    Sample("[now(5)]", content="[now(5)]"),
    Sample("[now(a=b)]", content="[now(a=b)]"),
    Sample("[now(a=open('x'))]", content="[now(a=open('x'))]"),
    Sample("[now(**{'a': 1})]", content="[now(**{'a': 1})]"),
    Sample("[now(a=b'x')]", content="[now(a=b'x')]"),
    Sample("[now(a=1e999)]", content="[now(a=1e999)]"),
    Sample("[now(a={1: 2})]", content="[now(a={1: 2})]"),
    Sample("[now(a=(1])]", content="[now(a=(1])]"),
    Sample("[now(a='x", content="[now(a='x"),
    Sample("[now(a='x\\", content="[now(a='x\\"),
    Sample("[now(), ", content=", ", calls=(("now", {}),)),
    Sample("[now(a=" + "[" * 60, content="[now(a=" + "[" * 60),
    Sample("[", content="["),
]


@pytest.mark.parametrize("sample", PYTHONIC, ids=lambda sample: sample.text[:40])
def test_pythonic(sample: Sample) -> None:
    check_sample(AnswerFormat("pythonic"), sample)


THOUGHT = "<|channel|>analysis<|message|>Let me think.<|end|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Bern"}<|call|>'
)
FINAL = "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
HARMONY = [
    Sample("Plain words.", content="Plain words."),
    Sample(THOUGHT + FINAL, reasoning="Let me think.", content="It rains."),
    Sample(THOUGHT + CALL, reasoning="Let me think.", calls=(("get_weather", {"city": "Bern"}),)),
    Sample(
        THOUGHT + "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>" + CALL.removesuffix("<|call|>"),
        reasoning="Let me think.",
        content="I look.",
        calls=(("get_weather", {"city": "Bern"}),),
    ),
    Sample(
        f"{THOUGHT}<|start|>assistant{THOUGHT}",
        reasoning="Let me think.\n\nLet me think.",
    ),
    Sample(
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.now<|message|> {} <|call|>",
        calls=(("now", {}), ("now", {})),
    ),
    Sample("<|channel|>final<|message|>", content=""),
    Sample("<|channel|>final<|message|>cut <|e", content="cut <|e"),
    Sample("<|channel|>analysis", content="<|channel|>analysis"),
    Sample("<|channel|>poetry<|message|>x<|end|>", content="<|channel|>poetry<|message|>x"),
    Sample(
        CALL.replace("get_weather", "launch"), content=CALL.replace("get_weather", "launch").removesuffix("<|call|>")
    ),
    Sample(CALL[:-20], content=CALL[:-20]),
    Sample(CALL.replace('{"city"', "{city"), content=CALL.replace('{"city"', "{city").removesuffix("<|call|>")),
]


@pytest.mark.parametrize("sample", HARMONY, ids=lambda sample: sample.text[:60])
def test_gpt_oss(sample: Sample) -> None:
    check_sample(AnswerFormat("gpt-oss", "gpt-oss"), sample)


def test_gpt_oss_without_separation() -> None:
    form = AnswerFormat("gpt-oss", "gpt-oss")

    def wanted(tools: ParserContext | None) -> Wanted:
        return Wanted(tools=tools, reasoning=False)

    answer = check_all_splits(lambda: form.parser(wanted(context())), THOUGHT + FINAL)
    assert (answer.content, answer.reasoning) == ("Let me think.\n\nIt rains.", "")
    answer = check_all_splits(lambda: form.parser(wanted(None)), CALL)
    assert answer.content == CALL.removesuffix("<|call|>")
    alone = check_all_splits(lambda: AnswerFormat("gpt-oss").parser(wanted(context())), THOUGHT + CALL)
    assert alone.content == "Let me think."
    assert json.loads(alone.calls[0].arguments) == {"city": "Bern"}
    assert AnswerFormat(None, "gpt-oss").parser(Wanted()).push("<|channel|>analysis<|message|>x") != []
