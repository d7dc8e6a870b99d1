"""Text in and out of the engine: tokenizer, incremental detokenizer, stop conditions, chat templates.

It knows neither requests in flight nor HTTP, and imports no array library.
"""

from cardan.text.detokenizer import Detokenizer
from cardan.text.named_templates import builtin_templates, read_chat_template
from cardan.text.stop_scanner import REGEX_WINDOW, validate_stop_regex
from cardan.text.stops import StopChecker, build_stop_checker
from cardan.text.stream import TextStream
from cardan.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "REGEX_WINDOW",
    "Detokenizer",
    "StopChecker",
    "TextStream",
    "Tokenizer",
    "build_stop_checker",
    "builtin_templates",
    "load_tokenizer",
    "read_chat_template",
    "validate_stop_regex",
]
