"""Formats of reasoning, alone and before calls, split in every way."""

from __future__ import annotations

import pytest
from splits import Sample, check_sample

from cardan.parsers import AnswerFormat

CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
CLOSED = [
    Sample("<think>\nOne, two.\n</think>\n\nThree.", reasoning="One, two.", content="Three."),
    Sample("<think>a < b </ think> </thin</think>yes", reasoning="a < b </ think> </thin", content="yes"),
    Sample("\n<think></think> ok\n", content="ok\n"),
    Sample("<think>\nstill thinking", reasoning="still thinking"),
    Sample("<think>cut </thi", reasoning="cut </thi"),
    Sample(f"<think>t</think>{CALL}", reasoning="t", calls=(("now", {}),)),
    Sample(f"<think>leaks {CALL} end", reasoning="leaks", content=" end", calls=(("now", {}),)),
    Sample("<think>a</think>b <think>c</think>", reasoning="a", content="b <think>c</think>"),
]
NO_TAG = [
    Sample("Plain.", content="Plain."),
    Sample("  <thinking> is no tag", content="  <thinking> is no tag"),
    Sample("<thi", content="<thi"),
    Sample("\n", content="\n"),
]
OPEN = [
    Sample("One.\n</think>\nTwo.", reasoning="One.", content="Two."),
    Sample("only thoughts", reasoning="only thoughts"),
    Sample(f"t </think>{CALL}\n", reasoning="t", calls=(("now", {}),)),
]


@pytest.mark.parametrize("sample", [*CLOSED, *NO_TAG], ids=lambda sample: sample.text[:30])
def test_qwen3(sample: Sample) -> None:
    check_sample(AnswerFormat("hermes", "qwen3"), sample)


@pytest.mark.parametrize("sample", [*CLOSED, *OPEN], ids=lambda sample: sample.text[:30])
def test_deepseek_r1(sample: Sample) -> None:
    check_sample(AnswerFormat("hermes", "deepseek-r1"), sample)


@pytest.mark.parametrize("sample", OPEN, ids=lambda sample: sample.text[:30])
def test_a_prompt_may_open_the_reasoning(sample: Sample) -> None:
    check_sample(AnswerFormat("hermes", "qwen3"), sample, prompt="<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize("sample", NO_TAG, ids=lambda sample: sample.text[:30])
def test_a_prompt_may_close_the_reasoning(sample: Sample) -> None:
    check_sample(AnswerFormat("hermes", "deepseek-r1"), sample, prompt="<|Assistant|>\n<think>\n\n</think>\n\n")
