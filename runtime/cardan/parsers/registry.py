"""The formats that are known by name, and how they are found in a chat template.

It knows no request. Plugins add to both tables through their hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from cardan.errors import ConfigError
from cardan.parsers.base import Parser, ParserContext, new_call_id
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
        new_id: makes the id of a call, where the model writes none and its chat template wants a certain form.
    """

    build: Callable[[ParserContext], Parser]
    markers: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    no_signs: tuple[str, ...] = ()
    new_id: Callable[[], str] = new_call_id


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


def choose_parsers(tool_call_parser: str, reasoning_parser: str, templates: Iterable[str]) -> tuple[str | None, ...]:
    """The names of the formats of calls and of reasoning, None for none.

    Args:
        tool_call_parser: a name, ``none``, or ``auto`` for what the chat templates show.
        reasoning_parser: likewise.
        templates: the model's chat templates.

    Raises:
        ConfigError: there is no format of that name.
    """
    source = "\n".join(templates)
    return (
        _choose("--tool-call-parser", tool_call_parser, TOOL_FORMATS, source),
        _choose("--reasoning-parser", reasoning_parser, REASONING_FORMATS, source),
    )


def _choose(flag: str, name: str, known: Mapping[str, ToolFormat | ReasoningFormat], source: str) -> str | None:
    if name in known:
        return name
    if name not in (AUTO, NONE):
        raise ConfigError(
            f"{flag} is {name!r}, expected {AUTO}, {NONE}, or one of {', '.join(sorted(known))}. "
            f"With {AUTO} the chat template decides."
        )
    if name == NONE:
        return None
    fitting = (
        name
        for name, kind in known.items()
        if kind.signs
        and all(sign in source for sign in kind.signs)
        and not any(sign in source for sign in kind.no_signs)
    )
    return next(fitting, None)
