"""Formats of calls whose arguments stand one by one between tags, as texts without a type.

Each class shows its format in its docstring; they are known from the chat templates and documentation of the models.
"""

from __future__ import annotations

import json

from cardan.parsers.base import BrokenCallError, CallParser
from cardan.parsers.source import Markers, Script
from cardan.parsers.typed_values import json_of, types_of


class TaggedCallParser(CallParser):
    """Calls whose arguments become one JSON object, argument by argument. Texts go out as they come."""

    trims_lines = False
    """Whether a line break at either end of a value belongs to its tags."""

    def _begin(self, name: str) -> None:
        """Begin a call.

        Raises:
            BrokenCallError: there is no such function.
        """
        self._start_call(name)
        self._schema = self._context.schema(name)
        self._keys: set[str] = set()
        self._add_arguments("{")

    def _finish(self) -> None:
        self._add_arguments("}")
        self._end_call()

    def _read_argument(self, key: str, closing: Markers) -> Script[None]:
        """Read a value up to its closing tag, and that too.

        Raises:
            BrokenCallError: there is no end to it, or the key was there before.
        """
        key = key.strip()
        if not key or key in self._keys:
            raise BrokenCallError
        self._add_arguments((", " if self._keys else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._keys.add(key)
        if self.trims_lines:
            yield from self._source.accept("\n")
        if types_of(self._schema, key) == {"string"}:
            yield from self._read_text(closing)
        else:
            text, marker = yield from self._source.until(closing)
            if not marker:
                raise BrokenCallError
            text = text.removesuffix("\n") if self.trims_lines else text
            self._add_arguments(json_of(text, self._schema, key))
        self._source.take(len(closing.texts[0]))

    def _read_text(self, closing: Markers) -> Script[None]:
        self._add_arguments('"')
        held = ""
        while True:
            text, marker = yield from self._source.piece(closing)
            text, held = held + text, ""
            if marker == "":
                raise BrokenCallError
            if self.trims_lines and text.endswith("\n"):
                text, held = text[:-1], "\n"
            self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            if marker:
                break
        self._add_arguments('"')


class QwenCoderParser(TaggedCallParser):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`` with line breaks between.

    The outer element may be missing.
    """

    starts = Markers(["<tool_call>", "<function="])
    trims_lines = True
    _closing = Markers(["</parameter>"])

    def _read_calls(self, start: str) -> Script[None]:
        if start == "<tool_call>":
            yield from self._expect("<function=")
        name, _ = yield from self._read_name((">",))
        self._begin(name)
        while True:
            yield from self._source.skip_space()
            if (yield from self._source.accept("</function>")):
                break
            yield from self._expect("<parameter=")
            yield from self._read_argument((yield from self._read_word(">")), self._closing)
        self._finish()
        yield from self._source.accept_spaced("</tool_call>")


class GlmParser(TaggedCallParser):
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>``; line breaks may part it."""

    starts = Markers(["<tool_call>"])
    _closing = Markers(["</arg_value>"])

    def _read_calls(self, start: str) -> Script[None]:
        yield from self._source.skip_space()
        name, end = yield from self._read_name(("<arg_key>", "</tool_call>", "\n"))
        self._begin(name)
        while end != "</tool_call>":
            if end != "<arg_key>":
                yield from self._source.skip_space()
                end = yield from self._source.accept_any(("<arg_key>", "</tool_call>"))
                if not end:
                    raise BrokenCallError
                continue
            key = yield from self._read_word("</arg_key>")
            yield from self._expect("<arg_value>")
            yield from self._read_argument(key, self._closing)
            end = ""
        self._finish()


class _InvokeParser(TaggedCallParser):
    """Calls as ``<invoke name="NAME"><parameter name="KEY">VALUE</parameter>…</invoke>``."""

    trims_lines = True
    prefix = ""
    """What stands before the names of the tags."""

    def _read_invoke(self) -> Script[None]:
        """Read one call behind ``<invoke name=``.

        Raises:
            BrokenCallError: it is none.
        """
        quote = yield from self._source.accept_any(('"', "'"))
        name, _ = yield from self._read_name((f"{quote}>",))
        self._begin(name)
        closing = Markers([f"</{self.prefix}parameter>"])
        while True:
            yield from self._source.skip_space()
            if (yield from self._source.accept(f"</{self.prefix}invoke>")):
                break
            yield from self._expect(f"<{self.prefix}parameter name=")
            quote = yield from self._source.accept_any(('"', "'"))
            yield from self._read_argument((yield from self._read_word(f"{quote}>")), closing)
        self._finish()


class MiniMaxParser(_InvokeParser):
    """``<minimax:tool_call>`` around ``<invoke name="NAME"><parameter name="KEY">VALUE</parameter>…</invoke>``."""

    starts = Markers(["<minimax:tool_call>"])

    def _read_calls(self, start: str) -> Script[None]:
        yield from self._expect("<invoke name=")
        while True:
            yield from self._read_invoke()
            following = yield from self._source.accept_spaced("<invoke name=", "</minimax:tool_call>")
            if following != "<invoke name=":
                return


STEP_MARKS = (
    "<｜tool_calls_begin｜>",
    "<｜tool_calls_end｜>",
    "<｜tool_call_begin｜>",
    "<｜tool_call_end｜>",
    "<｜tool_sep｜>",
)
"""Marks of Step 3's format."""


class StepParser(_InvokeParser):
    """A section of calls, each ``<｜tool_call_begin｜>function<｜tool_sep｜>`` and a ``steptml:invoke`` element.

    Its arguments are ``<steptml:parameter name="KEY">VALUE</steptml:parameter>``.
    """

    starts = Markers([STEP_MARKS[0], STEP_MARKS[2]])
    prefix = "steptml:"

    def _read_calls(self, start: str) -> Script[None]:
        if start == STEP_MARKS[0]:
            yield from self._expect(STEP_MARKS[2])
        while True:
            yield from self._source.skip_space()
            if (yield from self._source.accept("function")):
                yield from self._expect(STEP_MARKS[4])
            yield from self._expect("<steptml:invoke name=")
            yield from self._read_invoke()
            yield from self._source.accept_spaced(STEP_MARKS[3])
            yield from self._source.accept_spaced(STEP_MARKS[4])
            if (yield from self._source.accept_spaced(*STEP_MARKS[1:3])) != STEP_MARKS[2]:
                return
