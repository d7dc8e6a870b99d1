"""Chat templates and parsers together: what a template shows of calls is what the parser it names would find."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cardan.config import ModelConfig
from cardan.engine.model_files import load_model_tokenizer
from cardan.errors import RequestError
from cardan.parsers import AnswerFormat, ParserContext, Wanted, choose_parsers, read_answer
from cardan.parsers.base import read_tools
from cardan.text import read_chat_template
from cardan.text.chat import ChatInput, ChatTemplate

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a «place» <now>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALLS = (("get_weather", {"city": 'Zürich "HB" <&>'}), ("now", {}))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def called(*calls: tuple[str, Any]) -> list[dict[str, Any]]:
    return [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]


def talk(content: str = "", calls: tuple[tuple[str, Any], ...] = CALLS) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": content, "tool_calls": called(*calls)},
    ]


RESULT = {"role": "tool", "content": "sunny", "tool_call_id": "abcdefgh0"}


def check_calls(form: AnswerFormat, rendered: str, turn: str) -> None:
    """Check that the parser finds the calls in the last turn of a prompt."""
    parser = form.parser(Wanted(tools=ParserContext(tools=read_tools(TOOLS)), reasoning=False))
    answer = read_answer(parser, rendered.rpartition(turn)[2])
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls.values()] == list(CALLS)


NAMED = {
    "chatml": ("hermes", "<|im_start|>assistant\n", "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n"),
    "llama3": (
        "llama3",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|start_header_id|>ipython<|end_header_id|>\n\nsunny<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": ("mistral", "[/INST]", '[TOOL_RESULTS] {"content": "sunny", "call_id": "abcdefgh0"}[/TOOL_RESULTS]'),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_templates_show_tools(name: str) -> None:
    source = read_chat_template(name)
    form, turn, result = NAMED[name]
    assert choose_parsers("auto", "auto", [source]) == (form, None)
    template = ChatTemplate(source, SPECIAL, "the model")
    prompt = template.render(ChatInput(messages=talk()[:2], tools=TOOLS))
    assert prompt.count("Be kind.") == 1
    assert prompt.count("get_weather") == 1
    assert "«place»" in prompt
    assert prompt.index("get_weather") < prompt.index("Weather?")
    without = template.render(ChatInput(messages=talk()[:2]))
    assert "get_weather" not in without
    assert "You may call" not in without
    shown = template.render(ChatInput(messages=talk(), tools=TOOLS, add_generation_prompt=False))
    end = {"chatml": "<|im_end|>\n", "llama3": "<|eot_id|>", "mistral": "</s>"}[name]
    check_calls(AnswerFormat(form), shown.removesuffix(end), turn)
    answered = template.render(ChatInput(messages=[*talk(), RESULT], tools=TOOLS))
    assert answered.endswith(result)
    assert "Looking." in template.render(ChatInput(messages=talk("Looking."), tools=TOOLS))


def test_mistral_goes_on_after_results() -> None:
    template = ChatTemplate(read_chat_template("mistral"), SPECIAL, "the model")
    messages = [*talk(), RESULT, {"role": "assistant", "content": "Sun."}, {"role": "user", "content": "And now?"}]
    prompt = template.render(ChatInput(messages=messages, tools=TOOLS))
    assert prompt.endswith(" Sun.</s>[AVAILABLE_TOOLS] " + json.dumps(TOOLS, ensure_ascii=False) + "[/AVAILABLE_TOOLS]"
                           "[INST] And now? [/INST]")  # fmt: skip


def test_calls_that_a_template_would_hide_are_refused() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", SPECIAL, "the model")
    with pytest.raises(RequestError, match=r"messages\[2\] has tool_calls, but the model's chat template has no place"):
        template.render(ChatInput(messages=talk()))


def models_folder() -> Path:
    folder = os.environ.get("CARDAN_TEST_MODELS")
    if folder is None:
        pytest.skip("CARDAN_TEST_MODELS is not set")
    return Path(folder)


@pytest.mark.model
def test_the_template_of_qwen3() -> None:
    path = models_folder() / "qwen3tok" / "package" / "models" / "tokenizer_config.json"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    config: Mapping[str, Any] = json.loads(path.read_text())
    template = ChatTemplate(config["chat_template"], {}, "Qwen3")
    form = AnswerFormat.choose("auto", "auto", (config["chat_template"],))
    assert form == AnswerFormat("hermes", "qwen3")
    shown = template.render(ChatInput(messages=talk("Looking."), tools=TOOLS, add_generation_prompt=False))
    check_calls(form, shown.removesuffix("<|im_end|>\n"), "<|im_start|>assistant\n")
    assert form.reasoning is not None
    for options, begins_open in (({}, False), ({"enable_thinking": False}, False)):
        prompt = template.render(ChatInput(messages=talk()[:2], tools=TOOLS, extra=options))
        assert form.reasoning.begins_open(prompt) is begins_open


@pytest.mark.model
def test_the_template_of_qwen25_coder() -> None:
    path = models_folder() / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    tokenizer = load_model_tokenizer(ModelConfig(model=str(path)))
    form = AnswerFormat.choose("auto", "auto", tuple(tokenizer.chat_templates.values()))
    assert form == AnswerFormat("hermes", None)
    assert tokenizer.template_reads("tools")
    assert not tokenizer.template_reads("enable_thinking")
    shown = tokenizer.render_chat(talk(), tools=TOOLS, add_generation_prompt=False)
    check_calls(form, shown.removesuffix("<|im_end|>\n"), "<|im_start|>assistant\n")
    assert tokenizer.render_chat([*talk(), RESULT], tools=TOOLS).count("sunny") == 1
