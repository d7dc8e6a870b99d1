"""Formats whose calls are JSON objects with a name and arguments.

It does not know which model writes which; ``cardan.parsers.registry`` does.
"""

from __future__ import annotations

import functools
import json

import msgspec

from cardan.parsers.base import BrokenCallError, CallParser, ParserContext
from cardan.parsers.formats import Frames
from cardan.parsers.json_values import expect, read_text, read_value
from cardan.parsers.source import Markers, Script

ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")


class JsonCallParser(CallParser):
    """Calls as ``{"name": …, "arguments": {…}}``; the keys may come in any order."""

    def _read_object(self, *, opened: bool = False) -> Script[None]:
        """Read one call, and end it.

        Args:
            opened: the bracket that opens it was taken.

        Raises:
            BrokenCallError: this is no call.
        """
        call = _Call()
        if not opened:
            yield from expect(self._source, "{")
        while True:
            yield from self._source.skip_space()
            yield from self._read_member(call)
            yield from self._source.skip_space()
            if (yield from self._source.accept("}")):
                break
            yield from expect(self._source, ",")
        if self._open is None:
            if call.name is None:
                raise BrokenCallError
            self._start_call(call.name, call.id)
            self._add_arguments(call.arguments or "{}")
        self._end_call()

    def _read_member(self, call: _Call) -> Script[None]:
        key = yield from read_text(self._source)
        yield from self._source.skip_space()
        yield from expect(self._source, ":")
        yield from self._source.skip_space()
        if key == "name" and call.name is None:
            call.name = yield from read_text(self._source)
            if not self._context.knows(call.name):
                raise BrokenCallError
        elif key in ARGUMENT_KEYS and call.arguments is None:
            yield from self._read_arguments(call)
        elif key in _OTHER_KEYS:
            pieces: list[str] = []
            yield from read_value(self._source, pieces.append)
            value = json.loads("".join(pieces))
            if key == "id" and isinstance(value, str) and value:
                call.id = value
        else:
            raise BrokenCallError

    def _read_arguments(self, call: _Call) -> Script[None]:
        call.arguments = ""
        if (yield from self._source.at("{")) and call.name is not None:
            # The name is known, so the arguments need not wait for the end of the call.
            self._start_call(call.name, call.id)
            yield from read_value(self._source, self._add_arguments)
            return
        pieces: list[str] = []
        yield from read_value(self._source, pieces.append)
        call.arguments = as_object("".join(pieces))

    def _read_bare_arguments(self, name: str, call_id: str | None = None) -> Script[None]:
        """Read the arguments of a call whose name stood before them, and end it.

        Raises:
            BrokenCallError: there is no such function, or what follows is no JSON object.
        """
        if not (yield from self._source.at("{")):
            raise BrokenCallError
        self._start_call(name, call_id)
        yield from read_value(self._source, self._add_arguments)
        self._end_call()


class BareCallParser(JsonCallParser):
    """Calls may also be the whole answer, or its beginning: objects one after another, in a block of code or not."""

    def _read(self) -> Script[None]:
        self._source.mark()
        yield from self._guarded(self._read_opening())
        yield from super()._read()

    def _read_opening(self) -> Script[None]:
        yield from self._source.skip_space()
        fence = yield from self._source.accept_any(("```json", "```"))
        yield from self._read_objects()
        if fence:
            yield from self._source.accept_spaced("```")

    def _read_objects(self) -> Script[None]:
        """Read calls; ``;`` or ``,`` may stand between them.

        Raises:
            BrokenCallError: there is none.
        """
        yield from self._expect("{")
        while True:
            yield from self._read_object(opened=True)
            if (yield from self._source.accept_spaced(";", ",")):
                yield from self._expect("{")
            elif not (yield from self._source.accept_spaced("{")):
                return


@functools.lru_cache(maxsize=8)
def _starts_of(frames: Frames, names: tuple[str, ...]) -> tuple[dict[str, tuple[str, str]], Markers]:
    """What begins calls of some functions: of which one, with what ends them; and the same as markers.

    Kept, since every choice of a request needs it, and with many functions it takes long to make.
    """
    framed = {begin: (name, end) for name in names for begin, end in frames(name)}
    return framed, Markers(framed)


class FramedCallParser(CallParser):
    """Calls in frames to the letter, as a grammar lets them be written, whatever else the format allows."""

    def __init__(self, context: ParserContext, frames: Frames) -> None:
        """Start before an answer.

        Args:
            context: the functions; there is one at least.
            frames: what stands before and behind the arguments of a call of each.
        """
        self._framed, self.starts = _starts_of(frames, tuple(context.tools))
        super().__init__(context)

    def _read_calls(self, start: str) -> Script[None]:
        name, end = self._framed[start]
        if not (yield from self._source.at("{")):
            raise BrokenCallError
        self._start_call(name)
        yield from read_value(self._source, self._add_arguments)
        if not (yield from self._source.accept(end)):
            raise BrokenCallError
        self._end_call()


class _Call:
    """What is known of a call."""

    __slots__ = ("arguments", "id", "name")

    def __init__(self) -> None:
        self.name: str | None = None
        self.id: str | None = None
        self.arguments: str | None = None


def as_object(arguments: str) -> str:
    """Arguments as the text of a JSON object: some models write them as a string once more, or as ``null``.

    Raises:
        BrokenCallError: they are something else.
    """
    value = json.loads(arguments)
    if isinstance(value, str):
        arguments = value.strip()
        try:
            value = msgspec.json.decode(arguments.encode() or b"{}")
        except (ValueError, RecursionError):
            raise BrokenCallError from None
    if value is None or not arguments:
        return "{}"
    if not isinstance(value, dict):
        raise BrokenCallError
    return arguments
