"""What is measured: sequences of token ids, how much of each is a prompt, and what follows when it runs freely.

It knows no engine. The bundled texts are this project's own or in the public domain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from cardan.errors import ConfigError

BUNDLED = "prompts.json"
GREEDY_TOKENS = 24
"""Tokens of each prompt's free text."""
LEAST_POSITIONS = 8
"""Fewest scored positions that all sequences together are shortened to."""
MARGIN = 8
"""Tokens of the context that are left free beside a sequence and its free text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One sequence.

    Attributes:
        name: unique in its set.
        ids: prompt and what is forced to follow it.
        num_prompt: how many of them are the prompt; the others go through decode steps.
        score_from: first position whose token is scored, at least 1.
        wave: cases run together with those of their wave, the first first, so that later ones find prefixes cached.
        greedy_tokens: how many tokens are generated freely after the prompt.
    """

    name: str
    ids: tuple[int, ...]
    num_prompt: int
    score_from: int = 1
    wave: int = 0
    greedy_tokens: int = GREEDY_TOKENS

    def __post_init__(self) -> None:
        assert 1 <= self.score_from <= self.num_prompt <= len(self.ids), self.name

    @property
    def num_positions(self) -> int:
        """Positions that are scored."""
        return len(self.ids) - self.score_from

    @property
    def num_prefill(self) -> int:
        """Those of them within the prompt."""
        return self.num_prompt - self.score_from

    def without_sharing(self) -> Case:
        """The same, scored from its beginning and run with the first ones."""
        return replace(self, score_from=1, wave=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A case before it is tokenized.

    Attributes:
        name: unique in its set.
        text: the whole of it.
        prefix: what others begin with as well; it is scored once only, where ``wave`` is 0.
        decode: share of the tokens that goes through decode steps.
        wave: see ``Case``.
    """

    name: str
    text: str
    prefix: str = ""
    decode: float = 0.25
    wave: int = 0

    def case(self, encode: Callable[[str], Sequence[int]]) -> Case:
        """Tokenize it.

        Raises:
            ConfigError: it is too short to be scored.
        """
        ids = tuple(encode(self.prefix + self.text))
        if len(ids) < 2:
            raise ConfigError(f"Prompt {self.name!r} has {len(ids)} tokens, expected at least 2. Lengthen it.")
        shared = _common(ids, tuple(encode(self.prefix))) if self.prefix and self.wave else 1
        num_prompt = max(len(ids) - max(1, round(self.decode * len(ids))), shared, 1)
        return Case(name=self.name, ids=ids, num_prompt=num_prompt, score_from=max(shared, 1), wave=self.wave)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count


def bundled_texts() -> tuple[Text, ...]:
    """The texts that come with Cardan."""
    return _read(resources.files(__package__).joinpath(BUNDLED).read_text(encoding="utf-8"), BUNDLED)


def read_texts(path: Path) -> tuple[Text, ...]:
    """Texts of the user's own: JSON, a list of objects with ``name`` and ``text`` and the other fields of ``Text``.

    Raises:
        ConfigError: the file cannot be read or is no such list.
    """
    try:
        return _read(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {path} is no text in UTF-8 ({error.reason}). Save it as such.") from error


def _read(source: str, name: str) -> tuple[Text, ...]:
    try:
        entries = json.loads(source)
        texts = tuple(_text(entry) for entry in entries)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{name} is no set of prompts ({error}). Expected a JSON list of objects with name and text, and where "
            "wanted prefix, decode and wave."
        ) from error
    names = [text.name for text in texts]
    if not texts or len(set(names)) < len(names):
        raise ConfigError(f"{name} holds {len(names)} prompts of {len(set(names))} names. Give each its own name.")
    return texts


def _text(entry: Any) -> Text:
    known: dict[str, type | tuple[type, ...]] = {
        "name": str,
        "text": str,
        "prefix": str,
        "decode": (int, float),
        "wave": int,
    }
    for key, value in entry.items():
        if not isinstance(value, known[key]):
            raise TypeError(f"{key} is {value!r}")
    made = Text(**entry)
    if not 0 <= made.decode < 1 or made.wave not in (0, 1):
        raise ValueError("decode must be at least 0 and below 1, wave 0 or 1")
    return made


def limited(cases: Iterable[Case], most: int | None) -> tuple[Case, ...]:
    """Cases of at most so many scored positions together: all are shortened alike, none below a few tokens.

    Raises:
        ConfigError: that is too few.
    """
    cases = tuple(cases)
    total = sum(case.num_positions for case in cases)
    if most is None or total <= most:
        return cases
    if most < LEAST_POSITIONS:
        raise ConfigError(f"--positions must be at least {LEAST_POSITIONS}, got {most}.")
    share = most / total
    return tuple(_shortened(case, max(2, int(case.num_positions * share))) for case in cases)


def _shortened(case: Case, positions: int) -> Case:
    kept = case.ids[: case.score_from + min(positions, case.num_positions)]
    decode = max(1, round((len(case.ids) - case.num_prompt) / case.num_positions * positions))
    return replace(case, ids=kept, num_prompt=max(case.score_from, len(kept) - decode))


def check_cases(cases: Sequence[Case], vocab_size: int, context_length: int) -> tuple[Case, ...]:
    """Cases that fit a model: cut where its context ends.

    Raises:
        ConfigError: an id is not in its vocabulary, or the context is too short for any sequence.
    """
    for case in cases:
        if max(case.ids) >= vocab_size or min(case.ids) < 0:
            raise ConfigError(
                f"Prompt {case.name!r} holds token id {max(case.ids)}, but the model has {vocab_size} tokens. "
                "Compare models of one tokenizer."
            )
    return tuple(_cut(case, context_length - case.greedy_tokens - MARGIN) for case in cases)


def _cut(case: Case, room: int) -> Case:
    if len(case.ids) <= room:
        return case
    if room <= case.score_from:
        raise ConfigError(
            f"Prompt {case.name!r} does not fit: the model's context and pool leave {max(room, 0)} tokens beside "
            f"{case.greedy_tokens} of free text, and it is scored from its token {case.score_from}. "
            "Raise --context-length and --max-total-tokens."
        )
    return replace(case, ids=case.ids[:room], num_prompt=max(case.score_from, min(case.num_prompt, room - 1)))
