"""Prompts of requests: token ids are checked, text is encoded away from the event loop when it is long.

It knows no route.
"""

from __future__ import annotations

import asyncio

from cardan.errors import RequestError
from cardan.server.sampling import check_token_ids
from cardan.text.tokenizer import Tokenizer

MAX_PROMPTS = 1024
"""Most prompts of one HTTP request."""

MAX_TOTAL_CHOICES = 4096
"""Most choices of all prompts of one HTTP request together."""

LONG_TEXT = 4096
"""Texts beyond this many characters are encoded in a thread, so that other requests go on."""


def check_prompt_ids(value: object, vocab_size: int, param: str, most_tokens: int | None = None) -> tuple[int, ...]:
    """Token ids of one prompt.

    Args:
        value: what was sent.
        vocab_size: ids are below it.
        param: the field, for messages.
        most_tokens: ids beyond so many are not looked at, because the engine cuts them off.

    Raises:
        RequestError: it is no list of ids, or an id lies outside the vocabulary.
    """
    if not isinstance(value, list) or not all(type(item) is int for item in value[:most_tokens]):
        raise RequestError(f"'{param}' must be a list of token ids, or a list of such lists.", param=param)
    ids = tuple(value)
    check_token_ids(ids[:most_tokens], vocab_size, param)
    return ids


def check_total_choices(num_prompts: int, num_choices: int) -> None:
    """Check how many choices one HTTP request asks for in all.

    Raises:
        RequestError: too many.
    """
    if num_choices > MAX_TOTAL_CHOICES:
        raise RequestError(
            f"The {num_prompts} prompts ask for {num_choices} choices in all; one request may ask for at most "
            f"{MAX_TOTAL_CHOICES}. Lower 'n', or send several requests.",
            param="n",
            code="invalid_value",
        )


async def encode_prompt(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Token ids of a text."""
    if len(text) <= LONG_TEXT:
        return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    return tuple(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens))
