"""The native form of requests and answers: sampling parameters as a plain dict, outputs with ``meta_info``.

It knows neither HTTP nor processes; the offline ``Engine`` and the server's ``/generate`` share it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from cardan.engine.api import GenerateOutput, RequestTimes
from cardan.engine.validation import check_lengths
from cardan.errors import RequestError
from cardan.grammar.reading import NATIVE_FIELDS, read_fields
from cardan.grammar_spec import GrammarSpec
from cardan.types import FinishKind, FinishReason, LogprobParams, SamplingParams, TokenLogprobs

_SAMPLING_FIELDS = (*(field.name for field in dataclasses.fields(SamplingParams)), "grammar_strict")
_ONE_OR_MANY = ("stop", "stop_regex", "stop_token_ids", "shown_special_ids")


def sampling_from_dict(values: Mapping[str, Any] | None, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """Sampling parameters from plain values; None and missing keys take ``defaults``, then those of the class.

    ``stop``, ``stop_regex``, ``stop_token_ids`` and ``shown_special_ids`` may be one value or a list; keys of
    ``logit_bias`` may be
    strings, as in JSON. Ranges are checked at admission, not here.

    ``json_schema``, ``regex``, ``ebnf``, ``structural_tag`` and ``choice`` stand for ``grammar``; a schema of which
    the backend does not enforce every keyword is refused unless ``grammar_strict`` is false.

    Raises:
        RequestError: a key is unknown, or a value has the wrong type or too many entries.
    """
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        raise RequestError(f"sampling_params must be an object, got {type(values).__name__}.", param="sampling_params")
    given: dict[str, Any] = dict(defaults or {})
    grammars: dict[str, Any] = {}
    for key, value in values.items():
        if key in NATIVE_FIELDS:
            grammars[key] = value
        elif key not in _SAMPLING_FIELDS:
            raise _unknown_key(str(key))
        elif value is not None:
            given[key] = value
    strict = given.pop("grammar_strict", True)
    if not isinstance(strict, bool):
        raise RequestError(f"grammar_strict must be true or false, got {strict!r}.", param="grammar_strict")
    _add_grammar(given, read_fields(grammars, strict=strict))
    check_lengths(given)
    for key in _ONE_OR_MANY:
        if key in given and isinstance(given[key], (str, int)):
            given[key] = (given[key],)
    if isinstance(given.get("logit_bias"), Mapping):
        given["logit_bias"] = _biases(given["logit_bias"])
    return _convert(given)


def _add_grammar(given: dict[str, Any], spec: GrammarSpec | None) -> None:
    if spec is None:
        return
    if given.get("grammar") is not None:
        raise RequestError("grammar and another field both constrain the output. Drop one.", param="grammar")
    given["grammar"] = spec


def _convert(given: dict[str, Any]) -> SamplingParams:
    for key, value in given.items():
        try:
            msgspec.convert({key: value}, SamplingParams)
        except msgspec.ValidationError as error:
            raise RequestError(f"{key} is wrong: {error}, value {value!r}.", param=key) from None
    return msgspec.convert(given, SamplingParams)


def _unknown_key(key: str) -> RequestError:
    close = difflib.get_close_matches(key, _SAMPLING_FIELDS, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(_SAMPLING_FIELDS)}."
    return RequestError(f"{key!r} is not a sampling parameter.{hint}", param=key, code="unknown_parameter")


def _biases(values: Mapping[Any, Any]) -> dict[Any, Any]:
    biases = {_token_id(key): value for key, value in values.items()}
    if len(biases) < len(values):
        raise RequestError("logit_bias names a token twice, as text and as a number.", param="logit_bias")
    return biases


def _token_id(key: Any) -> Any:
    """A key as a number. In JSON keys are text; one number must have one spelling, or two keys would mean the same."""
    if not isinstance(key, str):
        return key
    if not (key.isascii() and key.isdecimal() and len(key) < 12 and str(int(key)) == key):
        raise RequestError(
            f"logit_bias has the key {key[:40]!r}, expected a token id, such as '123'.", param="logit_bias"
        )
    return int(key)


def logprob_params(
    return_logprob: bool = False,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    token_ids_logprob: list[int] | tuple[int, ...] | None = None,
) -> LogprobParams:
    """Which logprobs the native fields ask for; a start of None or -1 means: of the output only.

    Raises:
        RequestError: a field is wrong, or would have no effect without ``return_logprob``.
    """
    start = -1 if logprob_start_len is None else logprob_start_len
    if not return_logprob:
        without_effect = {
            "logprob_start_len": start != -1,
            "top_logprobs_num": bool(top_logprobs_num),
            "token_ids_logprob": bool(token_ids_logprob),
        }
        for name, given in without_effect.items():
            if given:
                raise RequestError(f"{name} needs return_logprob, which is false. Set it, or drop {name}.", param=name)
        return LogprobParams()
    if start < -1:
        raise RequestError(f"logprob_start_len must be -1 or a position, got {start}.", param="logprob_start_len")
    return LogprobParams(
        output=True,
        prompt_start=None if start == -1 else start,
        top=top_logprobs_num or 0,
        token_ids=tuple(token_ids_logprob or ()),
    )


def finish_reason_dict(reason: FinishReason | None) -> dict[str, Any] | None:
    """``{"type": "stop", "matched": …}``, ``{"type": "length", "length": …}`` or ``{"type": …, "message": …}``.

    An error that the request itself brought about has a ``code`` besides.
    """
    if reason is None:
        return None
    kind = str(reason.kind)
    if reason.kind is FinishKind.STOP:
        return {"type": kind, "matched": reason.matched}
    if reason.kind is FinishKind.LENGTH:
        return {"type": kind, "length": reason.length}
    code = {} if reason.code is None else {"code": reason.code}
    return {"type": kind, "message": reason.message, **code}


class NativeOutput:
    """Adds up the news of one choice into the dict that ``/generate`` gives."""

    def __init__(self, logprobs: LogprobParams | None = None, token_text: Callable[[int], str] | None = None) -> None:
        """Start empty.

        Args:
            logprobs: what was asked for; decides which lists ``meta_info`` has.
            token_text: text of a token, put beside its logprob; None leaves it out.
        """
        self._wanted = logprobs or LogprobParams()
        self._token_text = token_text
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs | None] = []
        self._prompt_ids: tuple[int, ...] = ()
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self._hidden_states: list[bytes] = []
        self._last: GenerateOutput | None = None

    def add(self, output: GenerateOutput) -> None:
        """Take the next news."""
        self._text.append(output.text)
        self._token_ids.extend(output.token_ids)
        self._logprobs.extend(output.logprobs)
        self._hidden_states.extend(output.hidden_states)
        if output.prompt_logprobs:
            self._prompt_ids = output.prompt_token_ids
            self._prompt_logprobs = output.prompt_logprobs
        self._last = output

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the choice has ended, or None while it goes on."""
        return None if self._last is None else self._last.finish_reason

    @property
    def finished(self) -> bool:
        """Whether the choice has ended."""
        return self.finish_reason is not None

    def as_dict(self) -> dict[str, Any]:
        """``text``, ``output_ids`` and ``meta_info`` of all news so far."""
        text = "".join(self._text)
        self._text = [text]
        return {"text": text, "output_ids": list(self._token_ids), "meta_info": self._meta_info()}

    def _meta_info(self) -> dict[str, Any]:
        last = self._last or GenerateOutput(rid="")
        times: RequestTimes = last.times
        info: dict[str, Any] = {
            "id": last.rid,
            "finish_reason": finish_reason_dict(last.finish_reason),
            "prompt_tokens": last.prompt_tokens,
            "completion_tokens": last.completion_tokens,
            "cached_tokens": last.cached_tokens,
            "num_retractions": last.num_retractions,
            "queue_time": times.queue_s,
            "first_token_latency": times.first_token_s,
            "e2e_latency": times.e2e_s,
        }
        if last.max_new_tokens_clamped is not None:
            info["max_new_tokens_clamped"] = last.max_new_tokens_clamped
        if last.truncated_from is not None:
            info["prompt_truncated_from"] = last.truncated_from
        if self._hidden_states and self.finished:
            info["hidden_states"] = hidden_state_lists(self._hidden_states, last.prompt_tokens)
        if self._wanted.output:
            info |= self._logprob_lists("output", self._token_ids, self._logprobs)
            info |= self._logprob_lists("input", list(self._prompt_ids), list(self._prompt_logprobs))
        return info

    def _logprob_lists(self, side: str, ids: list[int], logprobs: list[TokenLogprobs | None]) -> dict[str, Any]:
        pairs = list(zip(ids, logprobs, strict=False))
        lists: dict[str, Any] = {
            f"{side}_token_logprobs": [self._entry(item.logprob if item else None, token) for token, item in pairs]
        }
        if self._wanted.top:
            lists[f"{side}_top_logprobs"] = [self._entries(item.top) if item else None for _, item in pairs]
        if self._wanted.token_ids:
            lists[f"{side}_token_ids_logprobs"] = [self._entries(item.chosen) if item else None for _, item in pairs]
        return lists

    def _entry(self, logprob: float | None, token: int) -> list[Any]:
        return [logprob, token, self._token_text(token) if self._token_text else None]

    def _entries(self, found: tuple[tuple[int, float], ...]) -> list[list[Any]]:
        return [self._entry(logprob, token) for token, logprob in found]


def hidden_state_lists(states: Sequence[bytes], prompt_tokens: int) -> list[Any]:
    """Hidden states as the field gives them: a list of the prompt's vectors, then the vector of each output token.

    Args:
        states: float32 values of each token, as bytes.
        prompt_tokens: how many of them belong to the prompt.
    """
    vectors = [np.frombuffer(state, dtype=np.float32).tolist() for state in states]
    return [vectors[:prompt_tokens], *vectors[prompt_tokens:]]


def native_output(
    outputs: list[GenerateOutput],
    logprobs: LogprobParams | None = None,
    token_text: Callable[[int], str] | None = None,
) -> dict[str, Any]:
    """The dict of one choice from all its news; see ``NativeOutput``."""
    whole = NativeOutput(logprobs, token_text)
    for output in outputs:
        whole.add(output)
    return whole.as_dict()
