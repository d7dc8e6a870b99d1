"""Turns the tokens of all open choices into text, and decides when what was gathered goes out.

It knows no socket: messages in, a message out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from cardan.engine.messages import Details, OpenStream, TextBatch, TextNews, TokenBatch, TokenNews
from cardan.text.stream import TextStream
from cardan.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Choice:
    """What one choice has gathered since its last news went out."""

    stream: TextStream
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    details: Details | None = None
    started: bool = False

    def gather(self, token_ids: list[int], details: Details | None) -> None:
        """Add tokens."""
        finish = details.finish if details is not None else None
        self.text.append(self.stream.push(token_ids, finish))
        self.token_ids.extend(token_ids)
        if details is not None:
            self.details = details if self.details is None else _merge(self.details, details)

    def news(self, wire_id: str) -> TextNews:
        """Give out what was gathered."""
        news = TextNews(wire_id, "".join(self.text), tuple(self.token_ids), self.details)
        self.text, self.token_ids, self.details = [], [], None
        self.started = True
        return news


def _merge(earlier: Details, later: Details) -> Details:
    return msgspec.structs.replace(
        later,
        logprobs=(*earlier.logprobs, *later.logprobs),
        prompt_logprobs=(*earlier.prompt_logprobs, *later.prompt_logprobs),
        hidden_states=(*earlier.hidden_states, *later.hidden_states),
    )


class Detokenizer:
    """Text of all open choices.

    A choice's first token goes out at once, later ones ``stream_interval`` at a time, the end at once.
    """

    def __init__(self, tokenizer: Tokenizer, stream_interval: int) -> None:
        self._tokenizer = tokenizer
        self._interval = stream_interval
        self._choices: dict[str, _Choice] = {}
        self._due: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._choices)

    def open(self, message: OpenStream) -> None:
        """Begin a choice."""
        self._choices[message.wire_id] = _Choice(TextStream(message.sampling, self._tokenizer))

    def take(self, batch: TokenBatch) -> None:
        """Gather what a step gave."""
        for wire_id, token in zip(batch.plain_ids, batch.plain_tokens, strict=True):
            self._gather(wire_id, [token], None)
        for news in batch.news:
            self._gather_news(news)

    def _gather_news(self, news: TokenNews) -> None:
        self._gather(news.wire_id, news.token_ids, news.details)

    def _gather(self, wire_id: str, token_ids: list[int], details: Details | None) -> None:
        choice = self._choices[wire_id]
        choice.gather(token_ids, details)
        ended = details is not None and details.finish is not None
        if ended or not choice.started or len(choice.token_ids) >= self._interval:
            self._due[wire_id] = None

    def flush(self) -> TextBatch | None:
        """News of all choices that are due, or None when none is. Choices that ended are forgotten."""
        if not self._due:
            return None
        news = [self._choices[wire_id].news(wire_id) for wire_id in self._due]
        self._due = {}
        for item in news:
            if item.details is not None and item.details.finish is not None:
                del self._choices[item.wire_id]
        return TextBatch(news)
