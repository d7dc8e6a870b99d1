"""Messages survive the wire, and errors come out as what they went in as."""

from __future__ import annotations

import inspect
import math
import typing

import msgspec
import pytest

import cardan.errors
from cardan.engine import messages
from cardan.engine.api import EngineStats
from cardan.engine.messages import Details, ErrorReport, Generate, TextBatch, TextNews, TokenBatch, TokenNews
from cardan.errors import CardanError, EngineDeadError, QueueFullError, RequestError
from cardan.types import FinishKind, FinishReason, LogprobParams, SamplingParams, TokenLogprobs

DETAILS = Details(
    finish=FinishReason(FinishKind.STOP, matched="end"),
    prompt_tokens=3,
    cached_tokens=1,
    num_retractions=0,
    queue_s=0.5,
    max_new_tokens_clamped=9,
    truncated_from=70,
    logprobs=(TokenLogprobs(logprob=-1.0, top=((1, -1.0),), chosen=((2, -3.0),)), None),
    prompt_logprobs=(None, TokenLogprobs(logprob=-2.0)),
)
SAMPLING = SamplingParams(
    seed=2**64 - 1, stop=("a", "b"), stop_regex=("c+",), stop_token_ids=(4,), logit_bias={7: -math.inf, 8: 1.5}
)


@pytest.mark.parametrize(
    ("message", "decoder"),
    [
        (
            Generate("a.1", [1, 2], SAMPLING, LogprobParams(output=True, token_ids=(3,)), -1, "salt", "key", 1.25),
            messages.SCHEDULER_DECODER,
        ),
        (messages.Abort(None), messages.SCHEDULER_DECODER),
        (messages.Abort("a.1"), messages.SCHEDULER_DECODER),
        (messages.OpenStream("a.1", SAMPLING), messages.DETOKENIZER_DECODER),
        (TokenBatch(["a.1"], [5], [TokenNews("b.2", [1], DETAILS)]), messages.DETOKENIZER_DECODER),
        (TextBatch([TextNews("a.1", "é", (5,)), TextNews("b.2", "", (), DETAILS)]), messages.FRONTEND_DECODER),
        (messages.StatsReply(3, EngineStats(num_running=2, totals={"requests": 5})), messages.FRONTEND_DECODER),
        (messages.Failed("scheduler", ErrorReport("ConfigError", "no")), messages.FRONTEND_DECODER),
    ],
    ids=lambda value: type(value).__name__,
)
def test_messages_survive_the_wire(message, decoder):
    assert decoder.decode(messages.encode(message)) == message


def test_every_message_of_every_union_has_a_tag_of_its_own():
    for union in (messages.ToScheduler, messages.ToDetokenizer, messages.ToFrontend):
        tags = [kind.__struct_config__.tag for kind in typing.get_args(union)]
        assert None not in tags
        assert len(set(tags)) == len(tags)


def error_classes() -> list[type[CardanError]]:
    return [kind for _, kind in inspect.getmembers(cardan.errors, inspect.isclass) if issubclass(kind, CardanError)]


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_an_error_keeps_class_and_message(kind):
    report = ErrorReport.of(kind("page_size must be 16, got 3."))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=ErrorReport)
    assert type(sent.exception()) is kind
    assert str(sent.exception()) == "page_size must be 16, got 3."


def test_an_error_keeps_its_attributes():
    wrong = ErrorReport.of(RequestError("no", param="top_k", code="word")).exception()
    assert (wrong.param, wrong.code) == ("top_k", "word")
    assert ErrorReport.of(QueueFullError("full", retry_after_s=7.5)).exception().retry_after_s == 7.5


def test_any_other_exception_becomes_a_dead_engine():
    error = ErrorReport.of(ZeroDivisionError("division by zero")).exception()
    assert type(error) is EngineDeadError
    assert str(error) == "ZeroDivisionError: division by zero"
    assert str(ErrorReport.of(MemoryError()).exception()) == "MemoryError"
