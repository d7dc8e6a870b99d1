"""Calls written as Python: ``[get_weather(city="Paris"), now()]``, as Llama 3.2 and 4 write them.

No Python is run: arguments are literals, read from the syntax tree.
"""

from __future__ import annotations

import ast
import json
from typing import Any

from cardan.parsers.base import BrokenCallError, CallParser
from cardan.parsers.source import Markers, Script

MAX_DEPTH = 50
"""Deepest nesting of brackets in arguments."""

_WORDS = {"true": True, "false": False, "null": None}
_ESCAPES = "\\\n'\"abfnrtv0xuUN"
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class PythonicParser(CallParser):
    """``[NAME(KEY=VALUE, …), …]``, with ``<|python_start|>`` before and ``<|python_end|>`` behind it or not."""

    starts = Markers(["[", "<|python_start|>"])

    def _read_calls(self, start: str) -> Script[None]:
        if start != "[":
            yield from self._expect("[")
        while True:
            yield from self._source.skip_space()
            name, _ = yield from self._read_name(("(",))
            arguments = yield from self._read_arguments()
            self._start_call(name)
            self._add_arguments(arguments)
            self._end_call()
            if (yield from self._source.accept_spaced("]")):
                break
            yield from self._expect(",")
        yield from self._source.accept_spaced("<|python_end|>")

    def _read_arguments(self) -> Script[str]:
        """Read up to the bracket that closes a call, and that too; returns a JSON object.

        Raises:
            BrokenCallError: there is no such bracket, or an argument is no literal with a name.
        """
        text: list[str] = []
        open_brackets = [")"]
        while open_brackets:
            character = yield from self._source.peek()
            if not character or len(open_brackets) > MAX_DEPTH:
                raise BrokenCallError
            if character in "\"'":
                if text and text[-1].isalpha():
                    raise BrokenCallError
                text.append((yield from self._read_quoted(character)))
                continue
            text.append(self._source.take(1))
            if character in _CLOSING:
                open_brackets.append(_CLOSING[character])
            elif character in ")]}" and open_brackets.pop() != character:
                raise BrokenCallError
        return _as_json("f(" + "".join(text))

    def _read_quoted(self, quote: str) -> Script[str]:
        """Take a Python string with its quotes, one or three of them.

        Line breaks and backslashes that Python would not read in it become what the model meant: themselves.

        Raises:
            BrokenCallError: there is no end to it.
        """
        closing = quote * 3 if (yield from self._source.at(quote * 3)) else quote
        text = [self._source.take(len(closing))]
        while not (yield from self._source.at(closing)):
            character = yield from self._source.peek()
            if not character:
                raise BrokenCallError
            self._source.take(1)
            if character == "\\":
                following = yield from self._source.peek()
                if not following:
                    raise BrokenCallError
                character += self._source.take(1) if following in _ESCAPES else character
            text.append("\\n" if character == "\n" else character)
        return "".join(text) + self._source.take(len(closing))


def _as_json(call: str) -> str:
    """The arguments of a call as a JSON object.

    Raises:
        BrokenCallError: it is no call, or its arguments are no literals with names.
    """
    try:
        tree = ast.parse(call, mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            raise BrokenCallError
        arguments = {keyword.arg: _value(keyword.value) for keyword in tree.keywords}
        if None in arguments or len(arguments) < len(tree.keywords):
            raise BrokenCallError
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise BrokenCallError from None
    return text


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value) if value is None or isinstance(value, str | bool | int | float):
            return value
        case ast.Name(name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)) if not isinstance(value, bool):
            return -value
        case ast.List(items) | ast.Tuple(items):
            return [_value(item) for item in items]
        case ast.Dict(keys, values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise BrokenCallError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise BrokenCallError
