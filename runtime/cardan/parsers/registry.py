"""The formats that are known by name, and how they are found in a chat template.

It knows no request. Plugins add to both tables through their hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cardan.errors import ConfigError
from cardan.parsers.base import Parser, ParserContext
from cardan.parsers.json_calls import HermesParser

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes calls of tools.

    Attributes:
        build: makes the parser of one answer.
        markers: texts that the parser needs to see, though they may be special tokens, which texts leave out.
        starts: texts that can only begin calls; they end reasoning that the model did not close.
        signs: texts that a chat template of this format holds, all of them; none for formats that cannot be told.
        no_signs: texts that it does not hold.
    """

    build: Callable[[ParserContext], Parser]
    markers: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    no_signs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a model marks its reasoning.

    Attributes:
        opening: what begins it.
        closing: what ends it.
        is_open: whether answers begin within the reasoning where the prompt does not tell.
        signs: texts that a chat template of this format holds, all of them; none for formats that cannot be told.
        no_signs: texts that it does not hold.
    """

    opening: str = "<think>"
    closing: str = "</think>"
    is_open: bool = False
    signs: tuple[str, ...] = ()
    no_signs: tuple[str, ...] = ()

    def begins_open(self, prompt: str) -> bool:
        """Whether the answer to a prompt begins within the reasoning."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.opening):
            return True
        return self.is_open and not prompt.endswith(self.closing)


_HERMES = ToolFormat(
    build=HermesParser,
    markers=("<tool_call>", "</tool_call>"),
    starts=("<tool_call>",),
    signs=("<tool_call>",),
    no_signs=("<arg_key>", "<function="),
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": _HERMES,
    "qwen25": _HERMES,
}
"""Formats of calls by the name that ``--tool-call-parser`` takes."""

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek-r1": ReasoningFormat(is_open=True, signs=("</think>", "<｜Assistant｜>"), no_signs=("thinking",)),
    "qwen3": ReasoningFormat(signs=("<think>", "enable_thinking")),
}
"""Formats of reasoning by the name that ``--reasoning-parser`` takes."""


def choose_tool_parser(flag: str, templates: Mapping[str, str]) -> str | None:
    """The name of the format of calls: what the flag says, or what the chat templates show. None for none.

    Raises:
        ConfigError: there is no format of that name.
    """
    return _choose("--tool-call-parser", flag, TOOL_FORMATS, templates)


def choose_reasoning_parser(flag: str, templates: Mapping[str, str]) -> str | None:
    """The name of the format of reasoning: what the flag says, or what the chat templates show. None for none.

    Raises:
        ConfigError: there is no format of that name.
    """
    return _choose("--reasoning-parser", flag, REASONING_FORMATS, templates)


def check_parser_names(tool_call_parser: str, reasoning_parser: str) -> None:
    """Check names before anything is loaded.

    Raises:
        ConfigError: there is no format of that name.
    """
    choose_tool_parser(tool_call_parser, {})
    choose_reasoning_parser(reasoning_parser, {})


def _choose(
    flag: str, name: str, known: Mapping[str, ToolFormat | ReasoningFormat], templates: Mapping[str, str]
) -> str | None:
    if name in known:
        return name
    if name not in (AUTO, NONE):
        raise ConfigError(
            f"{flag} is {name!r}, expected {AUTO}, {NONE}, or one of {', '.join(sorted(known))}. "
            f"With {AUTO} the chat template decides."
        )
    if name == NONE:
        return None
    source = "\n".join(templates.values())
    fitting = (
        name
        for name, kind in known.items()
        if kind.signs
        and all(sign in source for sign in kind.signs)
        and not any(sign in source for sign in kind.no_signs)
    )
    return next(fitting, None)
