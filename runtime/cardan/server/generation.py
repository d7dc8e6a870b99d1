"""Runs engine requests for a route: several prompts at once, what each choice has so far, and when they end.

It knows neither API's form of a response.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from msgspec.structs import replace

from cardan.engine.api import GenerateOutput, GenerateRequest
from cardan.engine.merging import merge
from cardan.errors import CardanError, RequestAbortedError, RequestError, RequestTimeoutError
from cardan.server.state import LiveRequest, ServerState
from cardan.server.watching.watchers import Watcher
from cardan.types import FinishKind, FinishReason, TokenLogprobs

T = TypeVar("T")


class GenerationError(CardanError):
    """The engine ended a request with an error of its own (such as logits that hold NaN)."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of the engine.

    Attributes:
        request_id: the id that the client knows.
        requests: one per prompt; each has an id of its own.
        created: Unix time in whole seconds.
        unenforced: what was asked for and is not held to, beside keywords of schemas.
        live: under which it is known already, where it can be aborted before it runs.
    """

    request_id: str
    requests: tuple[GenerateRequest, ...]
    created: int = field(default_factory=lambda: int(time.time()))
    unenforced: tuple[str, ...] = ()
    live: LiveRequest | None = None

    @property
    def engine_ids(self) -> tuple[str, ...]:
        """The ids that the engine knows."""
        return tuple(request.rid or "" for request in self.requests)


class Taker(Protocol):
    """What takes the outputs of one choice."""

    def add(self, output: GenerateOutput) -> None:
        """Take the next output."""


@dataclass(slots=True)
class Choice:
    """All that one choice of one prompt has given so far; of its hidden states, the last one."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    max_new_tokens_clamped: int | None = None
    truncated_from: int | None = None
    hidden_state: bytes = b""

    def add(self, output: GenerateOutput) -> None:
        """Take the next output of this choice."""
        self.text += output.text
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        if output.hidden_states:
            self.hidden_state = output.hidden_states[-1]
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
            self.prompt_token_ids = output.prompt_token_ids
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
        self.prompt_tokens = output.prompt_tokens
        self.completion_tokens = output.completion_tokens
        self.cached_tokens = output.cached_tokens
        self.max_new_tokens_clamped = output.max_new_tokens_clamped
        self.truncated_from = output.truncated_from


@contextlib.contextmanager
def admitted(state: ServerState, job: Job) -> Iterator[Job]:
    """A job that can be aborted from here on, though it runs later; the block ends when it does, or fails.

    Raises:
        RequestError: its id is in use.
    """
    with state.preparing(job.request_id, job.engine_ids) as live:
        yield dataclasses.replace(job, live=live)


def new_choices(job: Job) -> list[list[Choice]]:
    """Empty choices, by prompt and choice."""
    return [[Choice() for _ in range(request.sampling.n)] for request in job.requests]


def _check_mode(state: ServerState, job: Job) -> None:
    """A server generates or embeds; what is asked of it must be the same."""
    embeds = state.config.model.is_embedding
    for request in job.requests:
        if embeds and request.pooling is None:
            raise RequestError(
                "This server was started with --is-embedding and generates no text. Send texts to /v1/embeddings, or "
                "start one without that flag.",
                code="unsupported",
            )
        if not embeds and request.pooling is not None:
            raise RequestError(
                "This server generates text and makes no embeddings. Start one with --is-embedding.",
                code="unsupported",
            )


async def run_job(state: ServerState, job: Job) -> AsyncGenerator[tuple[int, GenerateOutput], None]:
    """Outputs of all prompts as they come, each with the index of its prompt. Closing it aborts what still runs.

    Raises:
        RequestError: a prompt was refused (the others are aborted).
        QueueFullError: too many requests wait.
        EngineDeadError: a process of the engine ended.
        RequestTimeoutError: it ran longer than ``--request-timeout-s``.
    """
    _check_mode(state, job)
    live = job.live or LiveRequest(job.request_id, job.engine_ids)
    with state.opened(live), _watching(state, job) as watchers:
        source = merge([_observed(state, request, live) for request in job.requests])
        async with contextlib.aclosing(_in_time(source, state.config.server.request_timeout_s)) as outputs:
            async for index, output in outputs:
                for watcher in watchers:
                    watcher.see(index, output)
                yield index, output


def _aborted(request: GenerateRequest) -> Iterator[GenerateOutput]:
    """What the engine says of a request that is aborted before it starts."""
    reason = FinishReason(FinishKind.ABORT, message="The request was aborted.")
    num_tokens = len(request.input_ids or ())
    for index in range(request.sampling.n):
        yield GenerateOutput(rid=request.rid or "", index=index, prompt_tokens=num_tokens, finish_reason=reason)


async def run_until(
    state: ServerState, job: Job, has_enough: Callable[[], bool]
) -> AsyncGenerator[tuple[int, GenerateOutput], None]:
    """``run_job`` of one choice, which is ended as by a stop once its consumer has enough of its outputs."""
    async with contextlib.aclosing(run_job(state, job)) as outputs:
        async for index, output in outputs:
            yield index, output
            if output.finish_reason is None and has_enough():
                stopped = FinishReason(FinishKind.STOP)
                yield index, replace(output, text="", token_ids=(), logprobs=(), finish_reason=stopped)
                return


@contextlib.contextmanager
def _watching(state: ServerState, job: Job) -> Iterator[list[Watcher]]:
    watchers = [make(job.requests) for make in (*state.watch, state.recent.watch)]
    try:
        yield watchers
    finally:
        for watcher in watchers:
            watcher.close()


async def _in_time(source: AsyncGenerator[T, None], timeout_s: float | None) -> AsyncGenerator[T, None]:
    """The items of a source until time runs out; the source is closed at the end."""
    deadline_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    async with contextlib.aclosing(source) as items:
        if deadline_s is None:
            async for item in items:
                yield item
            return
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    item = await anext(items)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise RequestTimeoutError(
                    f"The request ran longer than {timeout_s:g} s, which is the most here, and was aborted. Ask for "
                    "fewer tokens, or try again when less is going on."
                ) from None
            yield item


async def _observed(
    state: ServerState, request: GenerateRequest, live: LiveRequest
) -> AsyncGenerator[GenerateOutput, None]:
    if request.rid in live.aborted:
        for output in _aborted(request):
            yield output
        return
    observer = state.metrics.observer()
    async with contextlib.aclosing(state.engine.generate(request)) as outputs:
        async for output in outputs:
            observer.see(output)
            yield output


async def run_to_end(state: ServerState, job: Job, takers: Sequence[Sequence[Taker]]) -> None:
    """Run a job to its end; ``takers``, by prompt and choice, get its outputs."""
    async with contextlib.aclosing(run_job(state, job)) as outputs:
        async for index, output in outputs:
            takers[index][output.index].add(output)


def check_failed(reason: FinishReason | None) -> None:
    """Raise when the engine ended a choice with an error.

    Raises:
        RequestError: the request brought it about.
        GenerationError: it did not.
    """
    if reason is None or reason.kind is not FinishKind.ERROR:
        return
    message = reason.message or "The engine ended this request with an error."
    if reason.code is not None:
        raise RequestError(message, code=reason.code)
    raise GenerationError(message)


def check_complete(reason: FinishReason | None) -> None:
    """Raise when a choice ended before its answer was complete, for routes whose answers cannot say so.

    Raises:
        RequestError: the request brought it about.
        GenerationError: the engine ended it with an error.
        RequestAbortedError: somebody aborted it.
    """
    check_failed(reason)
    if reason is not None and reason.kind is FinishKind.ABORT:
        raise RequestAbortedError("The request was aborted before its answer was complete.")
