"""JSON as models write it, read while it arrives: what is passed on is always the beginning of valid JSON.

Numbers that no float64 holds, and halves of surrogate pairs, are not: readers of JSON fail on them.

It does not know what a call looks like.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from cardan.parsers.base import BrokenCallError
from cardan.parsers.source import Script, Source

MAX_DEPTH = 200
"""Deepest nesting of arrays and objects; what reads the arguments later may fail on deeper ones."""

Emit = Callable[[str], None]

_IN_STRING = frozenset('"\\') | frozenset(map(chr, range(32)))
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")
_HIGH_HALVES, _LOW_HALVES = range(0xD800, 0xDC00), range(0xDC00, 0xE000)
"""Codes of the halves of a pair that stands for one character."""


def read_value(source: Source, emit: Emit, depth: int = 0) -> Script[None]:
    """Read one value and pass its text on as it comes, white space outside of strings left out.

    Line breaks and other control characters within strings, which JSON does not allow, are passed on escaped.

    Raises:
        BrokenCallError: the next character cannot belong to a JSON value; it is not taken.
    """
    first = yield from source.peek()
    if first == "{":
        yield from _read_items(source, emit, depth, is_object=True)
    elif first == "[":
        yield from _read_items(source, emit, depth, is_object=False)
    elif first == '"':
        yield from read_string(source, emit)
    elif first == "-" or first.isdigit():
        number = yield from source.take_while(lambda character: character in "+-.eE0123456789")
        if not _NUMBER.fullmatch(number) or not math.isfinite(float(number)):
            raise BrokenCallError
        emit(number)
    else:
        word = yield from source.accept_any(("true", "false", "null"))
        if not word:
            raise BrokenCallError
        emit(word)


def _read_items(source: Source, emit: Emit, depth: int, *, is_object: bool) -> Script[None]:
    close = "}" if is_object else "]"
    if depth >= MAX_DEPTH:
        raise BrokenCallError
    emit(source.take(1))
    yield from source.skip_space()
    if (yield from source.accept(close)):
        emit(close)
        return
    while True:
        if is_object:
            yield from _read_key(source, emit)
        yield from read_value(source, emit, depth + 1)
        yield from source.skip_space()
        if (yield from source.accept(close)):
            emit(close)
            return
        yield from expect(source, ",")
        emit(", ")
        yield from source.skip_space()


def _read_key(source: Source, emit: Emit) -> Script[None]:
    yield from read_string(source, emit)
    yield from source.skip_space()
    yield from expect(source, ":")
    emit(": ")
    yield from source.skip_space()


def read_string(source: Source, emit: Emit) -> Script[None]:
    """Read one string and pass its text on as it comes, quotes included.

    Raises:
        BrokenCallError: there is none, or an escape in it is wrong.
    """
    yield from expect(source, '"')
    emit('"')
    while True:
        while text := (yield from source.run(_IN_STRING)):
            emit(text)
        character = yield from source.peek()
        if not character:
            raise BrokenCallError
        source.take(1)
        if character == '"':
            emit('"')
            return
        if character == "\\":
            emit("\\" + (yield from _read_escape(source)))
        else:
            emit(json.dumps(character)[1:-1])


def _read_escape(source: Source) -> Script[str]:
    kind = yield from source.peek()
    if not kind or kind not in '"\\/bfnrtu':
        raise BrokenCallError
    source.take(1)
    if kind != "u":
        return kind
    first = yield from _read_code(source)
    if _in(_LOW_HALVES, first):
        raise BrokenCallError
    if not _in(_HIGH_HALVES, first):
        return kind + first
    yield from expect(source, "\\u")
    second = yield from _read_code(source)
    if not _in(_LOW_HALVES, second):
        raise BrokenCallError
    return f"u{first}\\u{second}"


def _read_code(source: Source) -> Script[str]:
    digits = yield from source.take_while(_HEX.__contains__, 4)
    if len(digits) < 4:
        raise BrokenCallError
    return digits


def _in(codes: range, digits: str) -> bool:
    return int(digits, 16) in codes


def expect(source: Source, literal: str) -> Script[None]:
    """Take a text that must come next.

    Raises:
        BrokenCallError: it does not.
    """
    if not (yield from source.accept(literal)):
        raise BrokenCallError


def read_text(source: Source) -> Script[str]:
    """Read one string whole and decode it.

    Raises:
        BrokenCallError: there is none.
    """
    pieces: list[str] = []
    yield from read_string(source, pieces.append)
    return str(json.loads("".join(pieces)))
