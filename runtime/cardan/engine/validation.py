"""Checks a request before it leaves the frontend: ranges, ids, patterns, and what the platform can do.

It knows no queue and no pool: how long a prompt may be is the scheduler's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, cast

from cardan.engine.api import GenerateRequest
from cardan.engine.input_embeds import check_embeds
from cardan.engine.messages import FeatureAnswer
from cardan.errors import RequestError
from cardan.grammar import NO_BACKEND, check_grammar
from cardan.platform import Capabilities, Feature, ModelFacts
from cardan.text.stop_scanner import MAX_STOP_CHARS, MAX_STOPS, validate_stop_regex
from cardan.types import LogprobParams, SamplingParams

MAX_CHOICES = 128
"""Most choices of one request."""
MAX_TOP_LOGPROBS = 128
"""Most alternatives at one position."""
MAX_RID_CHARACTERS = 256
"""Longest request id."""
MAX_KEY_CHARACTERS = 1024
"""Longest cache salt and routing key; they are kept as long as what they name."""
MAX_BIASES = 1024
"""Most entries of a logit bias. Every step of every request waits while those of one are gathered."""
MAX_STOP_IDS = 1024
"""Most token ids that end one request."""

REQUEST_FEATURES = (
    Feature.SAMPLING,
    Feature.PENALTIES,
    Feature.LOGIT_BIAS,
    Feature.LOGPROBS,
    Feature.PROMPT_LOGPROBS,
    Feature.GRAMMAR_MASK,
    Feature.HIDDEN_STATES,
    Feature.INPUT_EMBEDS,
)
"""Capabilities that depend on what a request asks for."""


UNSUPPORTED = "unsupported_on_platform"
"""Code of the error for a feature that the platform lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What requests are checked against.

    Attributes:
        vocab_size: ids are below it.
        platform: its name, for messages.
        lacking: features of ``REQUEST_FEATURES`` that the platform lacks.
        grammar_backend: what compiles grammars, or ``none``.
        hidden_size: width of the model's vectors.
        gives_hidden_states: whether requests may ask for hidden states.
        takes_processors: whether requests may name logit processors.
    """

    vocab_size: int
    platform: str
    lacking: Mapping[str, FeatureAnswer] = field(default_factory=dict)
    grammar_backend: str = NO_BACKEND
    hidden_size: int = 0
    gives_hidden_states: bool = False
    takes_processors: bool = False


def lacking_features(capabilities: Capabilities, model: ModelFacts | None = None) -> dict[str, FeatureAnswer]:
    """Features that requests may ask for and a platform, or the model where it is known, lacks, with the reasons."""
    lacking = {
        str(feature): FeatureAnswer(capabilities.get(feature).reason, capabilities.get(feature).alternative)
        for feature in REQUEST_FEATURES
        if not capabilities.supports(feature)
    }
    if model is not None and not model.takes_embeds:
        reason = f"models of the family {model.family!r} read token ids only"
        lacking.setdefault(str(Feature.INPUT_EMBEDS), FeatureAnswer(reason, "Send text or input_ids."))
    return lacking


@dataclass(frozen=True, slots=True)
class _Range:
    """Bounds of a number, both included but where ``above`` is given."""

    low: float
    high: float
    words: str
    exclusive_low: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.exclusive_low else value >= self.low
        return above and value <= self.high


_RANGES: dict[str, _Range] = {
    "temperature": _Range(0.0, 100.0, "between 0 and 100"),
    "top_p": _Range(0.0, 1.0, "above 0 and at most 1", exclusive_low=True),
    "min_p": _Range(0.0, 1.0, "between 0 and 1"),
    "frequency_penalty": _Range(-2.0, 2.0, "between -2 and 2"),
    "presence_penalty": _Range(-2.0, 2.0, "between -2 and 2"),
    "repetition_penalty": _Range(0.0, 2.0, "above 0 and at most 2", exclusive_low=True),
}
_COUNTS: dict[str, _Range] = {
    "max_new_tokens": _Range(0, 2**31 - 1, "between 0 and 2147483647"),
    "min_new_tokens": _Range(0, 2**31 - 1, "between 0 and 2147483647"),
    "n": _Range(1, MAX_CHOICES, f"between 1 and {MAX_CHOICES}"),
}
_LONGEST = {
    "stop": MAX_STOPS,
    "stop_regex": MAX_STOPS,
    "stop_token_ids": MAX_STOP_IDS,
    "shown_special_ids": MAX_STOP_IDS,
    "logit_bias": MAX_BIASES,
}


def check_request(request: GenerateRequest, limits: RequestLimits) -> None:
    """Check everything that needs no tokenizer.

    Raises:
        RequestError: with ``param`` set, what is wrong and what is expected.
    """
    _check_one_prompt(request, limits)
    if request.rid is not None and not 0 < len(request.rid) <= MAX_RID_CHARACTERS:
        raise RequestError(
            f"rid must have between 1 and {MAX_RID_CHARACTERS} characters, got {len(request.rid)}.", param="rid"
        )
    for name in ("cache_salt", "routing_key"):
        key = getattr(request, name)
        if key is not None and len(key) > MAX_KEY_CHARACTERS:
            raise RequestError(f"{name} may have at most {MAX_KEY_CHARACTERS} characters, got {len(key)}.", param=name)
    if not isinstance(request.priority, int) or abs(request.priority) > 2**31 - 1:
        raise RequestError(
            f"priority must be a 32-bit whole number, got {shown_number(request.priority)}.", param="priority"
        )
    if request.pooling is not None and (request.sampling.max_new_tokens or request.sampling.n != 1):
        raise RequestError(
            "A request with pooling asks for one hidden state and no token: max_new_tokens must be 0 and n 1, got "
            f"{shown_number(request.sampling.max_new_tokens)} and {shown_number(request.sampling.n)}.",
            param="max_new_tokens",
        )
    check_sampling(request.sampling, limits.vocab_size)
    _check_forced(request, limits.vocab_size)
    _check_logprobs(request.logprobs, limits.vocab_size)
    _check_features(request, limits)
    grammar = request.sampling.grammar
    if grammar is not None:
        check_grammar(grammar, limits.grammar_backend)
        _check_ids("starts_after", grammar.starts_after, limits.vocab_size)


def _check_one_prompt(request: GenerateRequest, limits: RequestLimits) -> None:
    prompts = {"text": request.text, "input_ids": request.input_ids, "input_embeds": request.input_embeds}
    given = [name for name, value in prompts.items() if value is not None]
    if len(given) != 1:
        shown = " and ".join(given) or "none of them"
        raise RequestError(f"A request needs one of text, input_ids and input_embeds, got {shown}.", param="text")
    if request.hidden_states and not limits.gives_hidden_states:
        raise RequestError(
            "return_hidden_states is off, since hidden states are large: a prompt's take as many numbers as its tokens "
            "times the model's width. Start the server with --enable-return-hidden-states.",
            param="return_hidden_states",
            code="feature_not_enabled",
        )
    if request.processor is not None and not limits.takes_processors:
        raise RequestError(
            "custom_logit_processor is off: it has the scheduler call code of an installed package before each token. "
            "Start the server with --enable-custom-logit-processor.",
            param="custom_logit_processor",
            code="feature_not_enabled",
        )
    if request.input_embeds is None:
        return
    check_embeds(request.input_embeds, limits.hidden_size)
    if request.logprobs.prompt_start is not None:
        raise RequestError(
            "Logprobs of a prompt need its token ids, and input_embeds has none. Drop logprob_start_len.",
            param="logprob_start_len",
        )


def check_prompt(request: GenerateRequest, prompt_ids: tuple[int, ...], limits: RequestLimits) -> None:
    """Check the token ids of a prompt.

    Raises:
        RequestError: the prompt is empty, has ids out of range, or is shorter than the logprobs ask.
    """
    param = "text" if request.input_ids is None else "input_ids"
    if request.input_embeds is not None:
        return
    if not prompt_ids:
        raise RequestError("The prompt has no tokens. Send at least one.", param=param)
    _check_ids(param, prompt_ids, limits.vocab_size)
    start = request.logprobs.prompt_start
    if start is not None and start > len(prompt_ids):
        raise RequestError(
            f"Prompt logprobs are wanted from position {start}, but the prompt has {len(prompt_ids)} tokens. "
            "Ask for an earlier position.",
            param="logprob_start_len",
        )


def _check_forced(request: GenerateRequest, vocab_size: int) -> None:
    forced, params = request.forced_output_ids, request.sampling
    if not forced:
        return
    _check_ids("forced_output_ids", forced, vocab_size)
    if params.temperature != 0 or params.grammar is not None:
        raise RequestError(
            "forced_output_ids leave nothing to choose: sampling must be greedy and without a grammar, got temperature "
            f"{shown_number(params.temperature)}{' and a grammar' if params.grammar is not None else ''}.",
            param="forced_output_ids",
        )
    if len(forced) > params.max_new_tokens:
        raise RequestError(
            f"forced_output_ids has {len(forced)} entries, more than max_new_tokens {params.max_new_tokens}. "
            "Raise the one or shorten the other.",
            param="forced_output_ids",
        )


def check_choices(params: SamplingParams) -> None:
    """Check how many choices are asked for, before anything is made for each of them.

    Raises:
        RequestError: too few or too many.
    """
    _check_number("n", params.n, _COUNTS["n"], whole=True)


def check_lengths(values: Mapping[str, Any]) -> None:
    """Check how many entries sampling parameters have, before time is spent on each of them.

    Raises:
        RequestError: one has too many.
    """
    for name, most in _LONGEST.items():
        value = values.get(name)
        if isinstance(value, Sized) and not isinstance(value, str) and len(value) > most:
            raise RequestError(f"{name} may have at most {most} entries, got {len(value)}.", param=name)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Check sampling parameters.

    Raises:
        RequestError: a value is out of range, not a number, or contradicts another.
    """
    check_lengths({name: getattr(params, name) for name in _LONGEST})
    for name, bounds in _RANGES.items():
        _check_number(name, getattr(params, name), bounds, whole=False)
    for name, bounds in _COUNTS.items():
        _check_number(name, getattr(params, name), bounds, whole=True)
    _check_number(
        "top_k", params.top_k, _Range(-1, 2**31 - 1, "-1 for the whole vocabulary, or at least 1"), whole=True
    )
    if params.top_k == 0:
        raise RequestError("top_k must be -1 for the whole vocabulary, or at least 1, got 0.", param="top_k")
    if params.min_new_tokens > params.max_new_tokens:
        raise RequestError(
            f"min_new_tokens is {params.min_new_tokens}, more than max_new_tokens {params.max_new_tokens}. "
            "Raise the one or lower the other.",
            param="min_new_tokens",
        )
    if params.seed is not None:
        _check_number("seed", params.seed, _Range(-(2**63), 2**64 - 1, "a 64-bit number"), whole=True)
    _check_stops(params, vocab_size)
    _check_bias(params.logit_bias, vocab_size)


def _check_number(name: str, value: object, bounds: _Range, *, whole: bool) -> None:
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind):
        expected = "a whole number" if whole else "a number"
        raise RequestError(f"{name} must be {expected}, got {value!r}.", param=name)
    assert isinstance(value, (int, float))
    # Comparing holds for NaN, infinities and whole numbers beyond any float alike.
    if not bounds.holds(value):
        raise RequestError(f"{name} must be {bounds.words}, got {shown_number(value)}.", param=name)


def shown_number(value: object) -> str:
    """A value as a message may repeat it; Python refuses to write whole numbers of thousands of digits."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    return repr(value)


def _check_ids(name: str, ids: Collection[object], vocab_size: int) -> None:
    if set(map(type, ids)) <= {int}:
        numbers = cast("Collection[int]", ids)
        if not numbers or (min(numbers) >= 0 and max(numbers) < vocab_size):
            return  # long prompts pass here, without a step of Python for each token
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} holds {shown_number(token)}, expected token ids between 0 and {vocab_size - 1}.", param=name
            )


def _check_stops(params: SamplingParams, vocab_size: int) -> None:
    _check_strings("stop", params.stop)
    _check_strings("stop_regex", params.stop_regex, validate_stop_regex)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("shown_special_ids", params.shown_special_ids, vocab_size)


def _check_strings(name: str, values: tuple[str, ...], check: Callable[[str], None] | None = None) -> None:
    for value in values:
        if not isinstance(value, str) or not 0 < len(value) <= MAX_STOP_CHARS:
            raise RequestError(
                f"{name} entries must be texts of 1 to {MAX_STOP_CHARS} characters, got {str(value)[:50]!r}.",
                param=name,
            )
        if check is not None:
            check(value)


def _check_bias(bias: Mapping[int, float], vocab_size: int) -> None:
    _check_ids("logit_bias", bias, vocab_size)
    for token, value in bias.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not value <= 1e6:
            raise RequestError(
                f"logit_bias of token {token} must be a number up to 1e6 (-inf forbids), got {shown_number(value)}.",
                param="logit_bias",
            )


def _check_logprobs(wanted: LogprobParams, vocab_size: int) -> None:
    most = min(MAX_TOP_LOGPROBS, vocab_size)
    _check_number("top_logprobs_num", wanted.top, _Range(0, most, f"between 0 and {most}"), whole=True)
    _check_ids("token_ids_logprob", wanted.token_ids, vocab_size)
    if len(wanted.token_ids) > MAX_TOP_LOGPROBS:
        raise RequestError(
            f"token_ids_logprob may have at most {MAX_TOP_LOGPROBS} ids, got {len(wanted.token_ids)}.",
            param="token_ids_logprob",
        )
    if wanted.prompt_start is not None:
        bounds = _Range(0, 2**31 - 1, "a position in the prompt")
        _check_number("logprob_start_len", wanted.prompt_start, bounds, whole=True)


def _asked_features(request: GenerateRequest) -> dict[Feature, str]:
    """Features that a request needs, each with the first field that asks for it."""
    params = request.sampling
    grammar = "grammar" if params.grammar is None else str(params.grammar.kind)
    uses: tuple[tuple[Feature, str, object], ...] = (
        (Feature.SAMPLING, "temperature", params.temperature > 0 and params.top_k != 1),
        (Feature.PENALTIES, "frequency_penalty", params.frequency_penalty),
        (Feature.PENALTIES, "presence_penalty", params.presence_penalty),
        (Feature.PENALTIES, "repetition_penalty", params.repetition_penalty != 1),
        (Feature.LOGIT_BIAS, "logit_bias", params.logit_bias),
        (Feature.LOGIT_BIAS, "forced_output_ids", request.forced_output_ids),
        (Feature.LOGIT_BIAS, "min_new_tokens", params.min_new_tokens),
        (Feature.LOGIT_BIAS, "custom_logit_processor", request.processor is not None),
        (Feature.GRAMMAR_MASK, grammar, params.grammar is not None),
        (Feature.LOGPROBS, "return_logprob", request.logprobs.output),
        (Feature.PROMPT_LOGPROBS, "logprob_start_len", request.logprobs.prompt_start is not None),
        (Feature.HIDDEN_STATES, "return_hidden_states", request.hidden_states),
        (Feature.HIDDEN_STATES, "an embedding", request.pooling is not None),
        (Feature.INPUT_EMBEDS, "input_embeds", request.input_embeds is not None),
    )
    asked: dict[Feature, str] = {}
    for feature, field_name, used in uses:
        if used:
            asked.setdefault(feature, field_name)
    return asked


def _check_features(request: GenerateRequest, limits: RequestLimits) -> None:
    for feature, param in _asked_features(request).items():
        lacking = limits.lacking.get(str(feature))
        if lacking is not None:
            raise RequestError(
                f"{param} needs {feature}, which platform {limits.platform!r} does not support: {lacking.reason}. "
                f"{lacking.alternative or f'Drop {param}.'}",
                param=param,
                code=UNSUPPORTED,
            )
