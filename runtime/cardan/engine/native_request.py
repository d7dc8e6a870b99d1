"""Native calls with one prompt or many, taken apart into one ``GenerateRequest`` per prompt.

It knows neither HTTP nor processes; the offline ``Engine`` and the server's ``/generate`` share it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from cardan.engine.api import GenerateRequest
from cardan.engine.input_embeds import are_many_embeds, read_embeds
from cardan.engine.logit_processors import read_processor
from cardan.engine.native import logprob_params, sampling_from_dict
from cardan.engine.validation import check_choices
from cardan.errors import RequestError
from cardan.types import SamplingParams


class NativeOptions(TypedDict, total=False):
    """What a native call takes beside prompt and sampling parameters; each may be a list, one entry per prompt."""

    input_ids: Sequence[int] | Sequence[Sequence[int]] | None
    input_embeds: Any
    return_hidden_states: bool | Sequence[bool] | None
    custom_logit_processor: Any
    return_logprob: bool | Sequence[bool] | None
    logprob_start_len: int | Sequence[int] | None
    top_logprobs_num: int | Sequence[int] | None
    token_ids_logprob: Sequence[int] | Sequence[Sequence[int]] | None
    return_text_in_logprobs: bool | None
    rid: str | Sequence[str] | None
    priority: int | Sequence[int] | None
    cache_salt: str | Sequence[str] | None
    routing_key: str | Sequence[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCall:
    """A native call, taken apart.

    Attributes:
        requests: one per prompt.
        batched: whether prompts were given as a list, so that the answer is one.
        text_in_logprobs: whether logprobs name their token's text.
    """

    requests: tuple[GenerateRequest, ...]
    batched: bool
    text_in_logprobs: bool = False

    @property
    def many(self) -> bool:
        """Whether the answer is a list: of prompts, or of the choices of one prompt."""
        return self.batched or any(request.sampling.n > 1 for request in self.requests)


def native_call(
    prompt: str | Sequence[str] | None,
    sampling_params: Mapping[str, Any] | SamplingParams | Sequence[Any] | None,
    options: NativeOptions,
    sampling_defaults: Mapping[str, Any] | None = None,
) -> NativeCall:
    """Take a native call apart.

    Args:
        prompt: a text or a list of texts; None when ``input_ids`` or ``input_embeds`` are given.
        sampling_params: for all prompts, or a list with one entry per prompt.
        options: see ``NativeOptions``; None and missing keys take the default.
        sampling_defaults: the model's; a ``SamplingParams`` is complete and takes none of them.

    Raises:
        RequestError: an option is unknown or of the wrong type, or a list has another length than the prompts.
    """
    given = _known(options)
    text_in_logprobs = given.pop("return_text_in_logprobs", False)
    prompts, batched = _prompts(prompt, given.pop("input_ids", None), given.pop("input_embeds", None))
    count = len(prompts)
    columns = {name: _spread(name, value, count, batched) for name, value in given.items()}
    sampling = _spread("sampling_params", sampling_params, count, batched)
    requests = []
    for index in range(count):
        row = {name: values[index] for name, values in columns.items()}
        row["processor"] = read_processor(row.pop("custom_logit_processor", None))
        row["hidden_states"] = row.pop("return_hidden_states", False)
        logprob_fields = {name: row.pop(name) for name in tuple(row) if "logprob" in name}
        chosen = sampling[index]
        params = chosen if isinstance(chosen, SamplingParams) else sampling_from_dict(chosen, sampling_defaults)
        check_choices(params)
        requests.append(
            GenerateRequest(
                **prompts[index],
                sampling=params,
                logprobs=logprob_params(**logprob_fields),
                **row,
            )
        )
    return NativeCall(requests=tuple(requests), batched=batched, text_in_logprobs=bool(text_in_logprobs))


_KINDS: dict[str, type | tuple[type, ...]] = {
    "return_logprob": bool,
    "return_hidden_states": bool,
    "logprob_start_len": int,
    "top_logprobs_num": int,
    "token_ids_logprob": (list, tuple),
    "rid": str,
    "priority": int,
    "cache_salt": str,
    "routing_key": str,
}


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    known = tuple(NativeOptions.__annotations__)
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
            raise RequestError(f"{name!r} is not an option of generate. {hint}", param=name, code="unknown_parameter")
    return {name: value for name, value in options.items() if value is not None}


def _prompts(prompt: Any, input_ids: Any, input_embeds: Any) -> tuple[list[dict[str, Any]], bool]:
    """Each prompt as fields of a ``GenerateRequest``, and whether they were given as a list."""
    given = {"a text": prompt, "input_ids": input_ids, "input_embeds": input_embeds}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        shown = " and ".join(names) or "none of them"
        raise RequestError(f"Pass one of a text, input_ids and input_embeds, got {shown}.", param="text")
    if input_embeds is not None:
        return _embed_prompts(input_embeds)
    if prompt is not None:
        if isinstance(prompt, str):
            return [{"text": prompt}], False
        if isinstance(prompt, Sequence) and prompt and all(isinstance(text, str) for text in prompt):
            return [{"text": text} for text in prompt], True
        raise RequestError("The prompt must be a text or a list of at least one text.", param="text")
    if not isinstance(input_ids, Sequence) or isinstance(input_ids, str) or not input_ids:
        raise RequestError("input_ids must be a list of token ids, or a list of such lists.", param="input_ids")
    if all(isinstance(ids, Sequence) and not isinstance(ids, str) for ids in input_ids):
        return [{"input_ids": tuple(ids)} for ids in input_ids], True
    return [{"input_ids": tuple(input_ids)}], False


def _embed_prompts(value: Any) -> tuple[list[dict[str, Any]], bool]:
    """Prompts of vectors: one list of vectors, or a list of such lists."""
    if are_many_embeds(value):
        return [{"input_embeds": read_embeds(prompt)} for prompt in value], True
    return [{"input_embeds": read_embeds(value)}], False


def _spread(name: str, value: Any, count: int, batched: bool) -> Sequence[Any]:
    """One value per prompt: a list is taken apart, anything else goes to all (but for ``rid``)."""
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    if name == "token_ids_logprob" and listed:
        listed = any(isinstance(entry, (list, tuple)) for entry in value)
    if listed and not batched:
        raise RequestError(f"{name} is a list, but there is one prompt. Pass one value.", param=name)
    if listed and len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts. Pass one per prompt.", param=name)
    if name == "rid" and batched and not listed:
        raise RequestError("rid must be a list with one id per prompt when prompts are a list.", param=name)
    values: Sequence[Any] = value if listed else [value] * count
    kind = _KINDS.get(name)
    for entry in values:
        if kind is not None and (not isinstance(entry, kind) or (isinstance(entry, bool) and kind is int)):
            expected = kind.__name__ if isinstance(kind, type) else "list"
            raise RequestError(f"{name} must be of type {expected}, got {entry!r}.", param=name)
    return values
