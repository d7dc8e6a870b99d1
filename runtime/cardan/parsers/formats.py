"""What is known of a format: how it is parsed, what it needs to see, how it is found in a chat template.

It knows no format by name; ``cardan.parsers.registry`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from cardan.parsers.base import Parser, ParserContext, new_call_id

Frames: TypeAlias = Callable[[str], tuple[tuple[str, str], ...]]
"""What may stand before and behind the arguments of a call of a function, for each way to write one."""


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
        frames: of calls, where arguments are JSON; none for formats that no grammar can hold to a schema. What stands
            before the arguments of one function is no part of what stands before those of another, and special tokens
            in it are among the markers.
        triggers: with what frames begin; ``starts`` where it is empty.
    """

    build: Callable[[ParserContext], Parser]
    markers: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    no_signs: tuple[str, ...] = ()
    new_id: Callable[[], str] = new_call_id
    frames: Frames | None = None
    triggers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a model marks its reasoning.

    Attributes:
        opening: what begins it.
        closing: what ends it.
        is_open: whether answers begin within the reasoning where the prompt does not tell.
        signs: texts that a chat template of this format holds, all of them; none for formats that cannot be told.
        no_signs: texts that it does not hold.
        build: makes the parser of whole answers, where reasoning and calls cannot be read apart from each other. It
            gets the functions that may be called, or None, and whether reasoning is told apart.
        markers: texts that such a parser needs to see, though they may be special tokens.
    """

    opening: str = "<think>"
    closing: str = "</think>"
    is_open: bool = False
    signs: tuple[str, ...] = ()
    no_signs: tuple[str, ...] = ()
    build: Callable[[ParserContext | None, bool], Parser] | None = None
    markers: tuple[str, ...] = ()

    def begins_open(self, prompt: str) -> bool:
        """Whether the answer to a prompt begins within the reasoning."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.opening):
            return True
        return self.is_open and not prompt.endswith(self.closing)
