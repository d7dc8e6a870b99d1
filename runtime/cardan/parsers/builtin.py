"""The formats that Cardan brings, by name, with the signs by which chat templates show them.

It parses nothing itself.
"""

from __future__ import annotations

import functools
import json
import secrets
import string
from collections.abc import Mapping

from cardan.parsers.formats import ReasoningFormat, ToolFormat
from cardan.parsers.harmony import HARMONY_MARKS, HarmonyParser
from cardan.parsers.json_formats import (
    DEEPSEEK_MARKS,
    KIMI_MARKS,
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    HermesParser,
    KimiParser,
    LlamaParser,
    MistralParser,
)
from cardan.parsers.pythonic import PythonicParser
from cardan.parsers.tagged_formats import STEP_MARKS, GlmParser, MiniMaxParser, QwenCoderParser, StepParser

_ID_LETTERS = string.ascii_letters + string.digits


def _short_id() -> str:
    """Nine letters and digits: Mistral's chat templates refuse other ids."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


def _llama_frames(name: str) -> tuple[tuple[str, str], ...]:
    """As the models write calls, with the type that they like to add or not, with spaces or not."""
    quoted = json.dumps(name)
    return (
        (f'{{"name": {quoted}, "parameters": ', "}"),
        (f'{{"name":{quoted},"parameters":', "}"),
        (f'{{"type": "function", "name": {quoted}, "parameters": ', "}"),
    )


def _section(before: str, behind: str) -> tuple[tuple[str, str], ...]:
    """A section of DeepSeek's with one call in it: what stands in the call before and behind the arguments."""
    section, section_end, call, call_end, _ = DEEPSEEK_MARKS
    return ((f"{section}{call}{before}", f"{behind}{call_end}{section_end}"),)


_HERMES = ToolFormat(
    build=HermesParser,
    markers=("<tool_call>", "</tool_call>"),
    starts=("<tool_call>",),
    signs=("<tool_call>",),
    no_signs=("<arg_key>", "<function="),
    frames=lambda name: ((f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ', "}\n</tool_call>"),),
)

BUILT_IN_TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _HERMES,
    "qwen25": _HERMES,
    "qwen3_coder": ToolFormat(
        build=QwenCoderParser,
        markers=("<tool_call>", "</tool_call>"),
        starts=("<tool_call>",),
        signs=("<function=", "<parameter="),
    ),
    "llama3": ToolFormat(
        build=LlamaParser,
        markers=("<|python_tag|>",),
        starts=("<|python_tag|>",),
        signs=("<|start_header_id|>", '"parameters"'),
        frames=_llama_frames,
        triggers=('{"name":', '{"type": "function", "name":'),
    ),
    "pythonic": ToolFormat(
        build=PythonicParser,
        markers=("<|python_start|>", "<|python_end|>"),
        starts=("<|python_start|>",),
        signs=("<|python_start|>",),
    ),
    "mistral": ToolFormat(
        build=MistralParser,
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        starts=("[TOOL_CALLS]",),
        signs=("[TOOL_CALLS]",),
        new_id=_short_id,
    ),
    "deepseekv3": ToolFormat(
        build=DeepSeekV3Parser,
        markers=DEEPSEEK_MARKS,
        starts=DEEPSEEK_MARKS[:1],
        signs=(DEEPSEEK_MARKS[0], "```json"),
        frames=lambda name: _section(f"function{DEEPSEEK_MARKS[4]}{name}\n```json\n", "\n```"),
    ),
    "deepseekv31": ToolFormat(
        build=DeepSeekV31Parser,
        markers=DEEPSEEK_MARKS,
        starts=DEEPSEEK_MARKS[:1],
        signs=(DEEPSEEK_MARKS[0],),
        no_signs=("```json",),
        frames=lambda name: _section(f"{name}{DEEPSEEK_MARKS[4]}", ""),
    ),
    "kimi_k2": ToolFormat(build=KimiParser, markers=KIMI_MARKS, starts=KIMI_MARKS[:1], signs=(KIMI_MARKS[0],)),
    "glm45": ToolFormat(
        build=GlmParser,
        markers=(
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
        starts=("<tool_call>",),
        signs=("<arg_key>",),
    ),
    "gpt-oss": ToolFormat(
        build=functools.partial(HarmonyParser, separate_reasoning=False),
        markers=HARMONY_MARKS,
        signs=HARMONY_MARKS[:4],
    ),
    "minimax": ToolFormat(
        build=MiniMaxParser,
        markers=("<minimax:tool_call>", "</minimax:tool_call>"),
        starts=("<minimax:tool_call>",),
        signs=("<minimax:tool_call>",),
    ),
    "step3": ToolFormat(build=StepParser, markers=STEP_MARKS, starts=STEP_MARKS[:1], signs=("<steptml:invoke",)),
}

_THINK = ("<think>", "</think>")

BUILT_IN_REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "gpt-oss": ReasoningFormat(
        opening="<|channel|>analysis<|message|>",
        closing="<|end|>",
        build=lambda tools, separate: HarmonyParser(tools, separate_reasoning=separate),
        markers=HARMONY_MARKS,
        signs=HARMONY_MARKS[:4],
    ),
    "kimi": ReasoningFormat(opening="◁think▷", closing="◁/think▷", signs=("◁think▷",)),
    "kimi_k2": ReasoningFormat(signs=(KIMI_MARKS[0], *_THINK)),
    "minimax": ReasoningFormat(is_open=True, signs=("<minimax:tool_call>", *_THINK)),
    "glm45": ReasoningFormat(signs=("<arg_key>", *_THINK)),
    "step3": ReasoningFormat(is_open=True, signs=("<steptml:invoke", *_THINK)),
    "deepseek-v3": ReasoningFormat(signs=("<｜Assistant｜>", "</think>", "thinking")),
    "deepseek-r1": ReasoningFormat(is_open=True, signs=("<｜Assistant｜>", "</think>")),
    "qwen3": ReasoningFormat(signs=("enable_thinking", *_THINK)),
    "qwen3-thinking": ReasoningFormat(is_open=True, signs=("<|im_start|>assistant", *_THINK)),
}
