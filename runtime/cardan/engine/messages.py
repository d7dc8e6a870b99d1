"""Every message between the processes of an engine, and its encoding (msgpack, never pickle).

It knows no socket and no process. Fields are sent by position, without their names.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import msgspec

import cardan.errors
from cardan.engine.api import EngineStats
from cardan.errors import CardanError, EngineBusyError, EngineDeadError, QueueFullError, RequestError
from cardan.types import FinishReason, LogprobParams, Pooling, SamplingParams, TokenLogprobs

T = TypeVar("T")


class ErrorReport(msgspec.Struct, array_like=True, frozen=True):
    """An exception on its way to another process.

    Attributes:
        kind: name of its class in ``cardan.errors``; any other becomes ``EngineDeadError``.
        message: its text.
        param: of a ``RequestError``.
        code: of a ``RequestError``.
        retry_after_s: of a ``QueueFullError`` or an ``EngineBusyError``.
    """

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorReport:
        """Describe an exception."""
        message = str(error)
        if not isinstance(error, CardanError):
            message = f"{type(error).__name__}: {message}" if message else type(error).__name__
        return cls(
            kind=type(error).__name__,
            message=message,
            param=getattr(error, "param", None),
            code=getattr(error, "code", None),
            retry_after_s=getattr(error, "retry_after_s", None),
        )

    def exception(self) -> CardanError:
        """The same error, as the same class of ``cardan.errors``."""
        found = getattr(cardan.errors, self.kind, None)
        if not (isinstance(found, type) and issubclass(found, CardanError)):
            return EngineDeadError(self.message)
        if issubclass(found, RequestError):
            return found(self.message, param=self.param, code=self.code)
        if issubclass(found, QueueFullError | EngineBusyError):
            return found(self.message, retry_after_s=self.retry_after_s or 1.0)
        return found(self.message)


# --- to the scheduler ---------------------------------------------------------------------------


class Generate(msgspec.Struct, tag="generate", array_like=True, frozen=True):
    """Run one choice of a request.

    Attributes:
        wire_id: unique among all requests that the engine ever saw.
        prompt_ids: the prompt.
        sampling: with ``n = 1`` and the choice's own seed.
        logprobs: which are wanted.
        priority: higher runs first, with priority scheduling.
        cache_salt: namespace of cached prefixes.
        routing_key: for the ``routing-key`` policy.
        arrival_s: on the machine's monotonic clock, which all processes share.
        truncated_from: length of the prompt before it was cut, or None.
        pooling: which hidden states stand for the prompt, or None.
        hidden_states: whether the hidden states of all tokens are wanted.
        embeds: the prompt as vectors, float32 bytes; ``prompt_ids`` then only say how many.
        forced_output_ids: the first output tokens, whatever the model says.
        processor: name and parameters (JSON) of a logit processor, or None.
    """

    wire_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    logprobs: LogprobParams
    priority: int
    cache_salt: str | None
    routing_key: str | None
    arrival_s: float
    truncated_from: int | None = None
    pooling: Pooling | None = None
    hidden_states: bool = False
    embeds: bytes | None = None
    forced_output_ids: tuple[int, ...] = ()
    processor: tuple[str, str] | None = None


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Abort one choice, or everything for None."""

    wire_id: str | None


class FlushCache(msgspec.Struct, tag="flush_cache", array_like=True, frozen=True):
    """Empty the prefix cache when nothing runs; answered by ``FlushReply``."""

    call_id: int


class GetStats(msgspec.Struct, tag="get_stats", array_like=True, frozen=True):
    """Asks for gauges and totals; answered by ``StatsReply``."""

    call_id: int


class StartProfile(msgspec.Struct, tag="start_profile", array_like=True, frozen=True):
    """Record what each step does; answered by ``ProfileReply``."""

    call_id: int
    num_steps: int | None


class StopProfile(msgspec.Struct, tag="stop_profile", array_like=True, frozen=True):
    """End the recording and write it; answered by ``ProfileReply``."""

    call_id: int


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """End the process; whatever runs is dropped."""


ToScheduler: TypeAlias = Generate | Abort | FlushCache | GetStats | StartProfile | StopProfile | Shutdown


# --- to the detokenizer -------------------------------------------------------------------------


class OpenStream(msgspec.Struct, tag="open", array_like=True, frozen=True):
    """A choice was admitted, and this is how its text is made."""

    wire_id: str
    sampling: SamplingParams


class Details(msgspec.Struct, array_like=True, frozen=True):
    """What a choice's news have beside tokens; see ``cardan.engine.api.GenerateOutput`` for the fields."""

    finish: FinishReason | None
    prompt_tokens: int
    cached_tokens: int
    num_retractions: int
    queue_s: float
    max_new_tokens_clamped: int | None = None
    truncated_from: int | None = None
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    embedding: tuple[float, ...] = ()
    hidden_states: tuple[bytes, ...] = ()


class TokenNews(msgspec.Struct, array_like=True, frozen=True):
    """News of one choice that are more than one plain token."""

    wire_id: str
    token_ids: list[int]
    details: Details


class TokenBatch(msgspec.Struct, tag="tokens", array_like=True, frozen=True):
    """What one step gave: choices with just one more token in two columns, all others one by one."""

    plain_ids: list[str]
    plain_tokens: list[int]
    news: list[TokenNews]


ToDetokenizer: TypeAlias = OpenStream | TokenBatch | Shutdown


# --- to the frontend ----------------------------------------------------------------------------


class TextNews(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of one choice and the text that they add; without details, all totals but the count stay as they were."""

    wire_id: str
    text: str
    token_ids: tuple[int, ...]
    details: Details | None = None


class TextBatch(msgspec.Struct, tag="texts", array_like=True, frozen=True):
    """News of some choices."""

    news: list[TextNews]


class Rejected(msgspec.Struct, tag="rejected", array_like=True, frozen=True):
    """The scheduler did not take a choice."""

    wire_id: str
    error: ErrorReport


class Progress(msgspec.Struct, tag="progress", array_like=True, frozen=True):
    """How far a part of the start is: ``done`` of ``total`` in units of its own; ``total`` 0 when unknown."""

    part: str
    done: int
    total: int


class FeatureAnswer(msgspec.Struct, array_like=True, frozen=True):
    """A capability that the platform lacks and requests may ask for."""

    reason: str
    alternative: str


class SchedulerReady(msgspec.Struct, tag="scheduler_ready", array_like=True, frozen=True):
    """The scheduler process serves; what the frontend must know of it.

    Attributes:
        model_name: short name of the model.
        model_path: where the weights came from.
        platform: name of the platform.
        vocab_size: of the model.
        context_length: longest sequence.
        max_input_tokens: longest prompt that is admitted.
        max_total_tokens: slots of the pool.
        plan: as plain JSON values.
        started_s: seconds by part.
        sampling_defaults: the model's, for what requests do not state.
        lacking: features that requests may ask for and the platform lacks.
        grammar_backend: what compiles grammars, or ``none``.
        hidden_size: width of the model's vectors.
    """

    model_name: str
    model_path: str
    platform: str
    vocab_size: int
    context_length: int
    max_input_tokens: int
    max_total_tokens: int
    plan: dict[str, Any]
    started_s: dict[str, float]
    sampling_defaults: dict[str, float]
    lacking: dict[str, FeatureAnswer]
    grammar_backend: str = "none"
    hidden_size: int = 0


class DetokenizerReady(msgspec.Struct, tag="detokenizer_ready", array_like=True, frozen=True):
    """The detokenizer process serves."""


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """A process gives up, at its start or later; it ends right after this."""

    process: str
    error: ErrorReport


class FlushReply(msgspec.Struct, tag="flush_reply", array_like=True, frozen=True):
    """Whether the cache was emptied."""

    call_id: int
    flushed: bool


class ProfileReply(msgspec.Struct, tag="profile_reply", array_like=True, frozen=True):
    """A recording was started, or is in ``path``; or what is wrong."""

    call_id: int
    path: str | None = None
    error: ErrorReport | None = None


class StatsReply(msgspec.Struct, tag="stats_reply", array_like=True, frozen=True):
    """Gauges and totals."""

    call_id: int
    stats: EngineStats


ToFrontend: TypeAlias = (
    TextBatch
    | Rejected
    | Progress
    | SchedulerReady
    | DetokenizerReady
    | Failed
    | FlushReply
    | ProfileReply
    | StatsReply
)

Message: TypeAlias = ToScheduler | ToDetokenizer | ToFrontend

_ENCODER = msgspec.msgpack.Encoder()
SCHEDULER_DECODER: msgspec.msgpack.Decoder[ToScheduler] = msgspec.msgpack.Decoder(ToScheduler)
DETOKENIZER_DECODER: msgspec.msgpack.Decoder[ToDetokenizer] = msgspec.msgpack.Decoder(ToDetokenizer)
FRONTEND_DECODER: msgspec.msgpack.Decoder[ToFrontend] = msgspec.msgpack.Decoder(ToFrontend)


def encode(message: Message) -> bytes:
    """Encode any message."""
    return _ENCODER.encode(message)
