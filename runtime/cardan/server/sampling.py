"""Sampling fields of OpenAI's routes: their types and ranges, and the step to ``SamplingParams``.

It knows no route.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from cardan.engine.api import EngineInfo
from cardan.engine.validation import MAX_BIASES, MAX_CHOICES, MAX_STOP_IDS
from cardan.errors import RequestError
from cardan.grammar.reading import GUIDED_FIELDS, read_fields
from cardan.grammar_spec import GrammarSpec
from cardan.server.http.bodies import Body
from cardan.text.stop_scanner import MAX_STOP_CHARS
from cardan.types import SamplingParams

MAX_TOKENS = 2**31 - 1
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16

GRAMMAR_FIELDS = ("response_format", "structured_outputs", *GUIDED_FIELDS)
"""Fields of OpenAI's routes that constrain the output."""


def as_strings(value: object) -> object:
    """One string or a list of strings, as a tuple; anything else is passed on for the type check to refuse."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError("must be a string or a list of strings.")
    if len(items) > MAX_STOPS:
        raise ValueError(f"may hold at most {MAX_STOPS} strings, got {len(items)}.")
    if any(not item for item in items):
        raise ValueError("must not hold an empty string, which would match everywhere.")
    if any(len(item) > MAX_STOP_CHARS for item in items):
        raise ValueError(f"may hold strings of at most {MAX_STOP_CHARS} characters.")
    return tuple(items)


def as_token_ids(value: object) -> object:
    """A list of token ids, as a tuple."""
    if isinstance(value, list) and len(value) > MAX_STOP_IDS:
        raise ValueError(f"may hold at most {MAX_STOP_IDS} token ids, got {len(value)}.")
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError("must be a list of token ids (whole numbers).")
    return tuple(value)


def as_biases(value: object) -> object:
    """OpenAI's ``{"token id": bias}``, with whole numbers as keys."""
    if not isinstance(value, dict):
        raise ValueError("must be an object that maps token ids to biases.")
    if len(value) > MAX_BIASES:
        raise ValueError(f"may hold at most {MAX_BIASES} token ids, got {len(value)}.")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # One spelling for each id, or two keys would mean the same: no sign, space or leading zero.
        if not (key.isascii() and key.isdecimal() and len(key) < 12 and str(int(key)) == key):
            raise ValueError(f"must map token ids such as '123' to biases, got the key {key[:20]!r}.")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"must map token ids to numbers from -100 to 100, got {str(bias)[:20]} for {key}.")
        biases[int(key)] = float(bias)
    return biases


def as_top_k(value: object) -> object:
    """A whole number above 0, or -1 for the whole vocabulary."""
    if type(value) is not int or value == 0 or value < -1 or value > MAX_TOKENS:
        raise ValueError(f"must be a whole number above 0, or -1 for the whole vocabulary, got {str(value)[:20]}.")
    return value


def as_seed(value: object) -> object:
    """A 64-bit whole number, signed or not."""
    if type(value) is not int or not -(2**63) <= value < 2**64:
        raise ValueError(f"must be a 64-bit whole number, got {str(value)[:20]}.")
    return value


Strings = Annotated[tuple[str, ...], BeforeValidator(as_strings, json_schema_input_type=str | list[str])]
TokenIds = Annotated[tuple[int, ...], BeforeValidator(as_token_ids, json_schema_input_type=list[int])]
Biases = Annotated[dict[int, float], BeforeValidator(as_biases, json_schema_input_type=dict[str, float])]
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class SamplingBody(Body):
    """How tokens are chosen and where the output stops: the fields of OpenAI's routes."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, BeforeValidator(as_top_k, json_schema_input_type=int)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    logit_bias: Annotated[dict[int, float], BeforeValidator(as_biases, json_schema_input_type=dict[str, float])] = (
        Field(default_factory=dict)
    )
    seed: Annotated[int | None, BeforeValidator(as_seed, json_schema_input_type=int | None)] = None
    stop: Strings = ()
    stop_regex: Strings = ()
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    response_format: Any = None
    structured_outputs: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    choice: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    def grammar(self) -> GrammarSpec | None:
        """What the output must match, or None.

        Raises:
            RequestError: a field is malformed, or more than one is given.
        """
        return read_fields({name: getattr(self, name) for name in GRAMMAR_FIELDS})

    def sampling(self, max_new_tokens: int, min_new_tokens: int, info: EngineInfo) -> SamplingParams:
        """The engine's form of these fields; the model's own defaults stand for those that were not sent.

        Raises:
            RequestError: an id lies outside the vocabulary, or the minimum exceeds the maximum.
        """
        check_token_ids(self.stop_token_ids, info.vocab_size, "stop_token_ids")
        check_token_ids(tuple(self.logit_bias), info.vocab_size, "logit_bias")
        if min_new_tokens > max_new_tokens:
            raise RequestError(
                f"min_new_tokens is {min_new_tokens}, more than the {max_new_tokens} that the output may have. "
                "Lower it, or raise the limit.",
                param="min_new_tokens",
                code="invalid_value",
            )
        stated = SamplingParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=dict(self.logit_bias),
            seed=self.seed,
            stop=self.stop,
            stop_regex=self.stop_regex,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            no_stop_trim=self.no_stop_trim,
            skip_special_tokens=self.skip_special_tokens,
            n=self.n,
            grammar=self.grammar(),
        )
        defaults: dict[str, Any] = {
            name: value for name, value in info.sampling_defaults.items() if name not in self.model_fields_set
        }
        return dataclasses.replace(stated, **defaults)


def check_token_ids(ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    """Check that ids lie in the vocabulary.

    Raises:
        RequestError: one does not.
    """
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"'{param}' holds token id {str(token)[:24]}; ids of this model go from 0 to {vocab_size - 1}.",
                param=param,
                code="token_id_out_of_range",
            )
