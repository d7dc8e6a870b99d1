"""Takes the text of answers apart: reasoning, words for the reader, calls of tools.

It knows neither tokens nor HTTP, and imports no tokenizer: text in, events out.
"""

from cardan.parsers.answers import AnswerFormat, Wanted, read_answer
from cardan.parsers.base import Parser, ParserContext, new_call_id, read_tools
from cardan.parsers.events import (
    Answer,
    CallArguments,
    CallDropped,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
    ToolCall,
)
from cardan.parsers.formats import ReasoningFormat, ToolFormat
from cardan.parsers.reasoning import PlainParser
from cardan.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, check_tool_format, choose_parsers

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "Answer",
    "AnswerFormat",
    "CallArguments",
    "CallDropped",
    "CallEnd",
    "CallStart",
    "Content",
    "Event",
    "Parser",
    "ParserContext",
    "PlainParser",
    "Reasoning",
    "ReasoningFormat",
    "ToolCall",
    "ToolFormat",
    "Wanted",
    "check_tool_format",
    "choose_parsers",
    "new_call_id",
    "read_answer",
    "read_tools",
]
