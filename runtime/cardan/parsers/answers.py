"""Puts the parser of one answer together: reasoning first, calls in what follows it.

It knows no API: servers ask for a parser, feed it text, and write its events down in their own form.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from cardan.parsers.base import Parser, ParserContext
from cardan.parsers.events import Answer
from cardan.parsers.formats import ReasoningFormat, ToolFormat
from cardan.parsers.json_calls import FramedCallParser
from cardan.parsers.json_formats import ForcedCallsParser
from cardan.parsers.reasoning import PlainParser, ReasoningInContentParser, ReasoningParser
from cardan.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, choose_parsers


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model's answers are to be read.

    Attributes:
        tool_parser: name in ``TOOL_FORMATS``, or None.
        reasoning_parser: name in ``REASONING_FORMATS``, or None.
    """

    tool_parser: str | None = None
    reasoning_parser: str | None = None

    @classmethod
    @functools.lru_cache(maxsize=16)
    def choose(cls, tool_call_parser: str, reasoning_parser: str, templates: tuple[str, ...]) -> AnswerFormat:
        """What two flags mean for a model.

        Args:
            tool_call_parser: a name, ``auto`` or ``none``.
            reasoning_parser: a name, ``auto`` or ``none``.
            templates: the model's chat templates.

        Raises:
            ConfigError: a name is not known.
        """
        return cls(*choose_parsers(tool_call_parser, reasoning_parser, templates))

    def __str__(self) -> str:
        """Both names in words."""
        return f"tool calls as {self.tool_parser or 'none'}, reasoning as {self.reasoning_parser or 'none'}"

    @property
    def tools(self) -> ToolFormat | None:
        """The format of calls."""
        return None if self.tool_parser is None else TOOL_FORMATS[self.tool_parser]

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of reasoning."""
        return None if self.reasoning_parser is None else REASONING_FORMATS[self.reasoning_parser]

    def markers(self, wanted: Wanted) -> frozenset[str]:
        """Texts that the parser needs to see, also where they are special tokens."""
        found: set[str] = set()
        reasoning = self.reasoning
        if wanted.tools is not None and self.tools is not None:
            found.update(self.tools.markers)
        if reasoning is not None and reasoning.build is not None:
            found.update(reasoning.markers)
        elif reasoning is not None and (wanted.reasoning or wanted.reasons_first):
            found |= {reasoning.opening, reasoning.closing}
        return frozenset(found)

    @staticmethod
    def _call_parser(form: ToolFormat, tools: ParserContext) -> tuple[Parser, tuple[str, ...]]:
        """What reads calls, and what ends reasoning that was not closed."""
        if tools.framed and form.frames is not None:
            # A grammar that holds calls begins behind the reasoning, so calls in it are none.
            return FramedCallParser(tools, form.frames), ()
        return form.build(tools), form.starts

    def parser(self, wanted: Wanted) -> Parser:
        """A parser for one answer."""
        reasoning, tools = self.reasoning, wanted.tools if self.tools is not None or wanted.forced else None
        inner: Parser = PlainParser()
        starts: tuple[str, ...] = ()
        if reasoning is not None and reasoning.build is not None:
            return ForcedCallsParser(tools) if wanted.forced and tools else reasoning.build(tools, wanted.reasoning)
        if wanted.forced and tools is not None:
            inner = ForcedCallsParser(tools)
        elif self.tools is not None and tools is not None:
            inner, starts = self._call_parser(self.tools, tools)
        if reasoning is None or not wanted.reasoning:
            if reasoning is None or not wanted.reasons_first:
                return inner
            return ReasoningInContentParser(reasoning.closing, inner)
        tags = (reasoning.opening, reasoning.closing)
        is_open = wanted.reasons_first or reasoning.begins_open(wanted.prompt)
        return ReasoningParser(tags, inner, is_open=is_open, also_ends=starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be told apart in one answer.

    Attributes:
        tools: the functions whose calls are looked for; None leaves calls in the content.
        reasoning: whether reasoning is told apart.
        prompt: the end of the rendered prompt, which says whether it has opened the reasoning already.
        forced: whether a grammar makes the model call, in the form that ``ForcedCallsParser`` reads.
        reasons_first: whether a grammar begins behind the reasoning, so that all before its closing tag is reasoning.
    """

    tools: ParserContext | None = None
    reasoning: bool = True
    prompt: str = ""
    forced: bool = False
    reasons_first: bool = False


def read_answer(parser: Parser, text: str) -> Answer:
    """Take a whole answer apart."""
    answer = Answer()
    answer.add(parser.push(text))
    answer.add(parser.finish())
    return answer
