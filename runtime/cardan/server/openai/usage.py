"""Parts that OpenAI's two generating routes share: usage, finish reasons, what was cut to fit.

It knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cardan.engine.api import GenerateOutput
from cardan.server.generation import Choice
from cardan.server.state import ServerState
from cardan.types import FinishKind, FinishReason


def usage_object(state: ServerState, prompts: Sequence[Sequence[Choice]]) -> dict[str, Any]:
    """OpenAI's ``usage`` over all prompts and their choices; a prompt counts once, whatever its ``n``."""
    prompt_tokens = sum(choices[0].prompt_tokens for choices in prompts)
    completion_tokens = sum(choice.completion_tokens for choices in prompts for choice in choices)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if state.config.server.enable_cache_report:
        # Later choices of a prompt find it cached by the first one; the least is what was there before.
        cached = sum(min(choice.cached_tokens for choice in choices) for choices in prompts)
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage


def finish_name(reason: FinishReason | None) -> dict[str, Any]:
    """``finish_reason`` in OpenAI's words (and ``abort``), with the stop that matched as the field adds it."""
    if reason is None:
        return {"finish_reason": None}
    matched = reason.matched if reason.kind is FinishKind.STOP else None
    return {"finish_reason": reason.kind.value, "matched_stop": matched}


def add_limits(
    response: dict[str, Any], news: Iterable[Choice | GenerateOutput], *, asked_for_output: bool = True
) -> None:
    """Tell what was cut to fit the KV pool or the context: the output's limit, where one was asked for, and prompts."""
    seen = list(news)
    clamped = [item.max_new_tokens_clamped for item in seen if item.max_new_tokens_clamped is not None]
    if clamped and asked_for_output:
        response["max_new_tokens_clamped"] = min(clamped)
    cut = [item.truncated_from for item in seen if item.truncated_from is not None]
    if cut:
        response["prompt_truncated_from"] = max(cut)
