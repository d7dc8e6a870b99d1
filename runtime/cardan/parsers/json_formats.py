"""Formats of calls whose arguments are JSON: what stands around it differs from model to model.

Each class shows its format in its docstring; they are known from the chat templates and documentation of the models.
"""

from __future__ import annotations

from cardan.parsers.base import BrokenCallError, ParserContext
from cardan.parsers.json_calls import BareCallParser, JsonCallParser
from cardan.parsers.source import Markers, Script


class HermesParser(BareCallParser):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, one element a call.

    Small models leave the tags out, so an answer that begins with a call of a declared function is one as well.
    """

    starts = Markers(["<tool_call>"])

    def _read_calls(self, start: str) -> Script[None]:
        yield from self._source.skip_space()
        yield from self._read_object()
        yield from self._source.accept_spaced("</tool_call>")

    def _read_opening(self) -> Script[None]:
        if not self._context.tools:
            raise BrokenCallError
        yield from super()._read_opening()


class LlamaParser(BareCallParser):
    """``{"name": …, "parameters": {…}}`` as the whole answer, or behind ``<|python_tag|>``; ``;`` parts several."""

    starts = Markers(["<|python_tag|>"])

    def _read_calls(self, start: str) -> Script[None]:
        yield from self._read_objects()


class ForcedCallsParser(BareCallParser):
    """``[{"name": …, "arguments": {…}}, …]`` or one such object: the answer of a model that was made to call."""

    starts = Markers([])

    def _read_opening(self) -> Script[None]:
        yield from self._source.skip_space()
        listed = yield from self._source.accept("[")
        yield from self._read_objects()
        if listed:
            yield from self._source.accept_spaced("]")


class MistralParser(JsonCallParser):
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]NAME[ARGS]{…}`` for each call.

    Between name and arguments of the second form ``[CALL_ID]`` and an id may stand.
    """

    starts = Markers(["[TOOL_CALLS]"])

    def _read_calls(self, start: str) -> Script[None]:
        yield from self._source.skip_space()
        if (yield from self._source.accept("[")):
            yield from self._read_list()
            return
        name, end = yield from self._read_name(("[ARGS]", "[CALL_ID]"), before="{")
        call_id = None
        if end == "[CALL_ID]":
            call_id = yield from self._read_word("[ARGS]")
        yield from self._source.skip_space()
        yield from self._read_bare_arguments(name, call_id)

    def _read_list(self) -> Script[None]:
        while True:
            yield from self._source.skip_space()
            yield from self._read_object()
            if (yield from self._source.accept_spaced("]", ",")) != ",":
                return


class _SectionParser(JsonCallParser):
    """Calls in a section of their own, each between marks."""

    begins: tuple[str, str]
    """What begins a section, and a call in it."""
    ends: tuple[str, str]
    """What ends a section, and a call in it."""

    def _read_calls(self, start: str) -> Script[None]:
        if start == self.begins[0]:
            yield from self._expect(self.begins[1])
        while True:
            yield from self._read_one()
            yield from self._source.accept_spaced(self.ends[1])
            if (yield from self._source.accept_spaced(self.ends[0], self.begins[1])) != self.begins[1]:
                return

    def _read_one(self) -> Script[None]:
        """Read one call between its marks.

        Raises:
            BrokenCallError: it is none.
        """
        raise AssertionError("a parser must say how one call is read")


_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

DEEPSEEK_MARKS = (_BEGIN, _END, _CALL, _CALL_END, _SEPARATOR)
"""Marks of DeepSeek's formats."""


class DeepSeekV31Parser(_SectionParser):
    """A section of ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>``."""

    starts = Markers([_BEGIN, _CALL])
    begins = (_BEGIN, _CALL)
    ends = (_END, _CALL_END)

    def _read_one(self) -> Script[None]:
        name, _ = yield from self._read_name((_SEPARATOR,))
        yield from self._source.skip_space()
        yield from self._read_bare_arguments(name)


class DeepSeekV3Parser(_SectionParser):
    """A section of calls, each with its type, its name, and its arguments in a block of code.

    ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME``, a line break, and ``{…}`` between lines of three backquotes,
    the first of which says ``json``.
    """

    starts = Markers([_BEGIN, _CALL])
    begins = (_BEGIN, _CALL)
    ends = (_END, _CALL_END)

    def _read_one(self) -> Script[None]:
        yield from self._expect("function", _SEPARATOR)
        name, _ = yield from self._read_name(("\n",))
        yield from self._expect("```json")
        yield from self._source.skip_space()
        yield from self._read_bare_arguments(name)
        yield from self._source.accept_spaced("```")


KIMI_MARKS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
"""Marks of Kimi K2's format."""


class KimiParser(_SectionParser):
    """A section of ``<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{…}<|tool_call_end|>``.

    What stands before the arguments is the call's id too, as the model wants to see it again.
    """

    starts = Markers([KIMI_MARKS[0], KIMI_MARKS[2]])
    begins = (KIMI_MARKS[0], KIMI_MARKS[2])
    ends = (KIMI_MARKS[1], KIMI_MARKS[3])

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._ids: set[str] = set()

    def _read_one(self) -> Script[None]:
        yield from self._source.skip_space()
        label = (yield from self._read_word(KIMI_MARKS[4])).strip()
        name, colon, number = label.removeprefix("functions.").rpartition(":")
        if not colon or not number.isdecimal():
            name = label.removeprefix("functions.")
        if not self._context.knows(name):
            raise BrokenCallError
        yield from self._source.skip_space()
        # An id that came before would make two results answer one call.
        call_id = label if colon and label not in self._ids else None
        yield from self._read_bare_arguments(name, call_id)
        self._ids.add(label)
