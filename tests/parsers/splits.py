"""Feeds answers to parsers in every way a stream may split them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from cardan.parsers import Answer, AnswerFormat, Event, Parser, ParserContext, Wanted
from cardan.parsers.events import CallArguments, Content, Reasoning

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "celsius": {"type": "boolean"},
        "place": {"type": "object", "properties": {"lat": {"type": "number"}}},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
}
TOOLS = {
    "get_weather": WEATHER,
    "now": {},
    "write.file-2": {"type": "object", "properties": {"text": {"type": "string"}}},
}
"""Functions that the samples call."""


def context(**changes: object) -> ParserContext:
    """The functions above, with ids that count up."""
    numbers = itertools.count()
    return ParserContext(tools=TOOLS, new_id=lambda: f"id{next(numbers)}", **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sample:
    """One answer and what is in it.

    Attributes:
        text: as the model writes it.
        content: what the reader gets.
        calls: name and arguments of each call.
        reasoning: what is thought.
    """

    text: str
    content: str = ""
    calls: tuple[tuple[str, object], ...] = ()
    reasoning: str = ""
    ids: tuple[str, ...] = field(default=())


def feed(parser: Parser, pieces: Iterable[str]) -> list[Event]:
    """All events of an answer that comes in pieces."""
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    return events + parser.finish()


def joined(events: Iterable[Event]) -> list[Event]:
    """Events with neighbours of one kind put together, so that they do not show how the text was split."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        match last, event:
            case Content(before), Content(text):
                found[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                found[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                found[-1] = CallArguments(index, before + text)
            case _:
                found.append(event)
    return found


def splits(text: str, seed: int = 0, random_splits: int = 12) -> Iterator[list[str]]:
    """Every split into two pieces, random ones into many, and single characters."""
    for at in range(len(text) + 1):
        yield [text[:at], text[at:]]
    chance = random.Random(seed)
    for _ in range(random_splits):
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(1, 12)))
        yield [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    yield list(text)


def check_all_splits(make: Callable[[], Parser], text: str) -> Answer:
    """Check that all splits say the same; returns what they say."""
    whole = joined(feed(make(), [text]))
    for pieces in splits(text):
        assert joined(feed(make(), pieces)) == whole, pieces
    answer = Answer()
    answer.add(whole)
    return answer


def check_sample(form: AnswerFormat, sample: Sample, prompt: str = "", *, forced: bool = False) -> None:
    """Check what is found in a sample, however it is split."""
    answer = check_all_splits(lambda: form.parser(Wanted(tools=context(), prompt=prompt, forced=forced)), sample.text)
    calls = list(answer.calls.values())
    assert [(call.name, json.loads(call.arguments)) for call in calls] == list(sample.calls)
    assert answer.content == sample.content
    assert answer.reasoning == sample.reasoning
    if sample.ids:
        assert tuple(call.id for call in calls) == sample.ids
    assert len({call.id for call in calls}) == len(calls)
