"""The formats that are known by name, and how they are found in a chat template.

It knows no request. Plugins add to both tables through their hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cardan.errors import ConfigError, PluginError
from cardan.parsers.builtin import BUILT_IN_REASONING_FORMATS, BUILT_IN_TOOL_FORMATS
from cardan.parsers.formats import ReasoningFormat, ToolFormat
from cardan.parsers.source import Markers

AUTO = "auto"
NONE = "none"


TOOL_FORMATS: dict[str, ToolFormat] = dict(BUILT_IN_TOOL_FORMATS)
"""Formats of calls by the name that ``--tool-call-parser`` takes."""

REASONING_FORMATS: dict[str, ReasoningFormat] = dict(BUILT_IN_REASONING_FORMATS)
"""Formats of reasoning by the name that ``--reasoning-parser`` takes."""


_PROBES = ("f", "f2", "xf")
"""Names of functions that begin and end like each other."""


def check_tool_format(name: str, form: ToolFormat) -> None:
    """Check the frames of a format that a plugin adds, with made-up functions.

    Raises:
        PluginError: calls in them could not be told apart, or begin with none of the triggers.
    """
    if form.frames is None:
        return
    begins = [begin for probe in _PROBES for begin, _ in form.frames(probe)]
    triggers = form.triggers or form.starts
    problem = next(
        (
            f"{begin!r} begins with none of the triggers {triggers}"
            for begin in begins
            if not begin.startswith(triggers)
        ),
        None,
    )
    if len(set(begins)) < len(begins):
        problem = f"calls of two functions begin with the same of {begins}"
    try:
        Markers(begins)
    except ValueError as error:
        problem = f"calls cannot be told apart: {error}"
    if problem is not None:
        raise PluginError(
            f"The frames of the format {name!r} for --tool-call-parser do not fit: {problem}. What stands before the "
            "arguments must begin with a trigger, name the function, and be no part of what stands there for another; "
            "docs/plugins.md has the conditions."
        )


def choose_parsers(tool_call_parser: str, reasoning_parser: str, templates: Iterable[str]) -> tuple[str | None, ...]:
    """The names of the formats of calls and of reasoning, None for none.

    Args:
        tool_call_parser: a name, ``none``, or ``auto`` for what the chat templates show.
        reasoning_parser: likewise.
        templates: the model's chat templates.

    Raises:
        ConfigError: there is no format of that name, or the two cannot be read together.
    """
    source = "\n".join(templates)
    tools = _choose("--tool-call-parser", tool_call_parser, TOOL_FORMATS, source)
    reasoning = _choose("--reasoning-parser", reasoning_parser, REASONING_FORMATS, source)
    reads_both = {name for name, kind in REASONING_FORMATS.items() if kind.build is not None}
    if tools != reasoning and None not in (tools, reasoning) and reads_both & {tools, reasoning}:
        raise ConfigError(
            f"--tool-call-parser {tools} and --reasoning-parser {reasoning} cannot go together: the format "
            f"{tools if tools in reads_both else reasoning} is of whole answers. "
            "Name it for both, or leave both to auto."
        )
    return tools, reasoning


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
