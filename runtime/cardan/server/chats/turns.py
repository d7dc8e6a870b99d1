"""One turn of a conversation, whatever API asked for it: a chat body in; events, totals and the sum of both out.

It knows no API's form of a response.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cardan.engine.api import GenerateOutput
from cardan.errors import RequestError
from cardan.parsers import Answer, Event
from cardan.server.chats.preparation import THINKING_SWITCHES, answer_format, prepare_chat
from cardan.server.generation import Choice, Job, check_complete, run_until
from cardan.server.http.bodies import parse_body
from cardan.server.openai.bodies import CHAT_REFUSED, ChatBody
from cardan.server.openai.deltas import AnswerReader
from cardan.server.state import LiveRequest, ServerState

T = TypeVar("T")


@dataclass(slots=True)
class Turn:
    """A turn of one choice that is about to run, runs, or has run.

    Attributes:
        state: of the server.
        job: what the engine is asked.
        reader: takes the answer apart.
        choice: totals so far.
    """

    state: ServerState
    job: Job
    reader: AnswerReader
    choice: Choice = field(default_factory=Choice)

    @property
    def answer(self) -> Answer:
        """What was found in the answer so far."""
        return self.reader.answer

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt as it was rendered."""
        return len(self.job.requests[0].input_ids or ())

    async def news(self) -> AsyncGenerator[tuple[list[Event], GenerateOutput], None]:
        """Run it: what each output of the engine adds. Closing this aborts the turn.

        Raises:
            GenerationError: the engine ended it with an error.
            RequestAbortedError: somebody aborted it.
            CardanError: what the engine raises.
        """
        run = run_until(self.state, self.job, lambda: self.reader.has_enough)
        async with contextlib.aclosing(run) as outputs:
            async for _, output in outputs:
                self.choice.add(output)
                reason = output.finish_reason
                check_complete(reason)
                yield self.reader.read(output.text, ends=reason is not None), output


async def open_turn(state: ServerState, fields: Mapping[str, Any], live: LiveRequest) -> Turn:
    """Check a chat and prepare its next turn.

    Args:
        state: of the server.
        fields: a body of ``/v1/chat/completions``; ``n`` is 1.
        live: under which the turn is known meanwhile, and whose id it gets.

    Raises:
        RequestError: the conversation or a field is wrong.
        UnknownModelError: another model is asked for.
    """
    body = parse_body(ChatBody, fields, CHAT_REFUSED)
    state.check_model(body.model)
    state.check_scheduling(body.priority, body.routing_key)
    prepared = await prepare_chat(state, body, live)
    return Turn(state, prepared.job, prepared.reader())


def thinking_fields(state: ServerState, wanted: bool, param: str) -> dict[str, Any]:
    """Fields of a chat that turn the model's reasoning on or off.

    Args:
        state: of the server.
        wanted: whether the model is to reason.
        param: the field that says so, for messages.

    Raises:
        RequestError: it is wanted, and the model cannot.
    """
    reads = state.engine.tokenizer.template_reads
    switches = {name: wanted for name in THINKING_SWITCHES if reads(name)}
    if wanted and not switches and answer_format(state).reasoning is None:
        raise RequestError(
            f"'{param}' has no effect: the model's chat template reads none of {', '.join(THINKING_SWITCHES)}, and "
            "this server does not know how the model marks its reasoning. Leave it out, or start the server with "
            "--reasoning-parser NAME.",
            param=param,
            code="unsupported_parameter",
        )
    return {"chat_template_kwargs": switches} if switches else {}


def effort_fields(state: ServerState, effort: str | None, param: str) -> dict[str, Any]:
    """Fields of a chat that say how much the model reasons.

    Raises:
        RequestError: the model's chat template has no such variable.
    """
    if effort is None:
        return {}
    reads = state.engine.tokenizer.template_reads
    if not any(reads(name) for name in ("reasoning_effort", *THINKING_SWITCHES)):
        raise RequestError(
            f"'{param}' has no effect: the model's chat template reads none of reasoning_effort, "
            f"{', '.join(THINKING_SWITCHES)}. Leave it out.",
            param=param,
            code="unsupported_parameter",
        )
    return {"reasoning_effort": effort}
