"""The main process's side of an engine: it checks and tokenizes requests, and hands their outputs to consumers.

It imports no platform and no array library: device and scheduler are in a process of their own.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import zmq
import zmq.asyncio

from cardan import __version__
from cardan.config import EngineConfig
from cardan.engine.api import EngineInfo, EngineStats, GenerateOutput, GenerateRequest
from cardan.engine.channels import DETOKENIZER_INBOX, FRONTEND_INBOX, SCHEDULER_INBOX, Outbox, open_inbox
from cardan.engine.children import Child, Children, end_children
from cardan.engine.messages import (
    FRONTEND_DECODER,
    Abort,
    DetokenizerReady,
    Failed,
    FlushCache,
    FlushReply,
    GetStats,
    Message,
    ProfileReply,
    Progress,
    Rejected,
    SchedulerReady,
    Shutdown,
    StartProfile,
    StatsReply,
    StopProfile,
    TextBatch,
    ToFrontend,
    encode,
)
from cardan.engine.model_files import load_model_tokenizer
from cardan.engine.open_requests import OpenRequest, OpenRequests
from cardan.engine.validation import RequestLimits, check_prompt, check_request
from cardan.errors import CardanError, EngineBusyError, EngineDeadError, QueueFullError, RequestError
from cardan.scheduler.limits import prompt_too_long
from cardan.text.tokenizer import Tokenizer

T = TypeVar("T")
ProgressListener = Callable[[str, int, int], None]
"""Called with a part of the start, how much of it is done, and how much there is (0 when unknown)."""

_LONG_TEXT_CHARACTERS = 4096
"""Longer texts are tokenized beside the event loop."""
_GRACE_S = 5.0
"""How long children may take to end when they are told to."""
_DEATH_NOTE_S = 0.3
"""How long to wait for a dead child's last words."""
_ANSWER_S = 10.0
"""How long the scheduler may take to answer a call. It does so between two steps, of which the longest take seconds;
whoever asks over HTTP has mostly given up by then."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Admission:
    """A request whose prompt is being tokenized.

    Attributes:
        rid: the caller's id, or None.
        aborted: somebody aborted it meanwhile.
    """

    rid: str | None
    aborted: bool = False


class Frontend:
    """Implements ``cardan.engine.api.AsyncEngine`` over a scheduler and a detokenizer process.

    Made by ``await Frontend.start(config)``; used from that event loop only.
    """

    def __init__(self, config: EngineConfig, on_progress: ProgressListener | None, children: Children) -> None:
        """Prepare; use ``start``."""
        self._config = config
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._folder = children.folder
        self._context = zmq.Context()
        self._inbox = open_inbox(zmq.asyncio.Context.shadow(self._context), self._folder, FRONTEND_INBOX)
        self._to_scheduler = Outbox(self._context, self._folder, SCHEDULER_INBOX)
        self._to_detokenizer = Outbox(self._context, self._folder, DETOKENIZER_INBOX)
        self._children = children.take()
        self._receiver: asyncio.Task[None] | None = None
        self._tokenizing = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._requests = OpenRequests()
        self._admissions: list[_Admission] = []
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._last_call = 0
        self._ready: dict[str, asyncio.Future[Any]] = {
            role: self._loop.create_future() for role in ("scheduler", "detokenizer")
        }
        self._dead: asyncio.Future[EngineDeadError] = self._loop.create_future()
        self._failure: CardanError | None = None
        self._draining = False
        self._closing = False
        self._tokenizer: Tokenizer | None = None
        self._info: EngineInfo | None = None
        self._limits = RequestLimits(vocab_size=0, platform="")

    # --- start and end ------------------------------------------------------------------------

    @classmethod
    async def start(
        cls, config: EngineConfig, on_progress: ProgressListener | None = None, children: Children | None = None
    ) -> Self:
        """Start the processes and wait until they serve.

        Args:
            config: what to run.
            on_progress: told how far the parts of the start are.
            children: the processes, where they were started before; the frontend ends them.

        Raises:
            CardanError: what made the start fail, as the class that was raised where it failed.
        """
        if children is None:
            children = await asyncio.get_running_loop().run_in_executor(None, Children)
        frontend = cls(config, on_progress, children)
        try:
            await frontend._start()
        except BaseException:
            await frontend.close()
            raise
        return frontend

    async def _start(self) -> None:
        started_s = time.monotonic()
        self._receiver = self._loop.create_task(self._receive())
        self._receiver.add_done_callback(self._receiver_ended)
        for child in self._children:
            child.watch(self._child_ended)
        # The files are opened here first, so that a model that has to be fetched is fetched once.
        self._tokenizer = await self._loop.run_in_executor(None, load_model_tokenizer, self._config.model)
        for child in self._children:
            child.configure(self._config)
        ready: SchedulerReady = await self._ready["scheduler"]
        await self._ready["detokenizer"]
        self._limits = RequestLimits(
            vocab_size=ready.vocab_size,
            platform=ready.platform,
            lacking=ready.lacking,
            grammar_backend=ready.grammar_backend,
            hidden_size=ready.hidden_size,
            gives_hidden_states=self._config.scheduler.enable_return_hidden_states,
            takes_processors=self._config.scheduler.enable_custom_logit_processor,
        )
        self._info = EngineInfo(
            model_name=self._config.model.served_model_name or ready.model_name,
            model_path=ready.model_path,
            vocab_size=ready.vocab_size,
            context_length=ready.context_length,
            max_input_tokens=ready.max_input_tokens,
            max_total_tokens=ready.max_total_tokens,
            plan=ready.plan,
            sampling_defaults=ready.sampling_defaults,
            grammar_backend=ready.grammar_backend,
            hidden_size=ready.hidden_size,
            version=__version__,
            started_s={**ready.started_s, "total": time.monotonic() - started_s},
        )

    async def drain(self, timeout_s: float) -> list[str]:
        """Take no new requests and wait for the open ones. Returns the ids of those that did not end in time."""
        self._draining = True
        await self._requests.wait_empty(timeout_s)
        return self._requests.rids

    async def close(self) -> None:
        """End the processes; open requests get an ``EngineDeadError``. Calling it again does nothing."""
        if self._closing:
            return
        self._closing = True
        self._fail(EngineDeadError("The engine was shut down."))
        self._send(Shutdown())
        self._to_detokenizer.send(encode(Shutdown()))
        await self._loop.run_in_executor(None, end_children, self._children, _GRACE_S if self._info else 0.0)
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.gather(self._receiver, return_exceptions=True)
        self._inbox.close()
        self._to_scheduler.close()
        self._to_detokenizer.close()
        self._context.term()
        self._tokenizing.shutdown(wait=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- what is served -----------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        assert self._tokenizer is not None, "Frontend.start was not awaited"
        return self._tokenizer

    @property
    def info(self) -> EngineInfo:
        """What is served."""
        assert self._info is not None, "Frontend.start was not awaited"
        return self._info

    @property
    def alive(self) -> bool:
        """Whether all processes run."""
        return self._failure is None and not self._closing

    @property
    def failure(self) -> CardanError | None:
        """Why the engine is dead, or None; a shutdown is a reason too."""
        return self._failure

    @property
    def child_pids(self) -> dict[str, int]:
        """Process ids by role."""
        return {child.role: child.pid for child in self._children}

    async def wait_dead(self) -> EngineDeadError:
        """Wait until a process ends that should not have; returns why."""
        return await asyncio.shield(self._dead)

    # --- requests -----------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        """Run one request; closing the generator aborts it. News that are not taken in time come joined.

        Raises:
            RequestError: the request is wrong (prompt too long, ids out of range, duplicate rid …).
            QueueFullError: too many requests wait, or the engine is shutting down.
            EngineDeadError: a process of the engine ended.
        """
        opened = await self._admit(request)
        try:
            while opened.choices or opened.pending:
                yield await opened.pending.take()
        finally:
            self._abort_wire_ids(self._requests.close(opened))

    async def _admit(self, request: GenerateRequest) -> OpenRequest:
        admission = _Admission(request.rid)
        self._admissions.append(admission)
        try:
            opened = await self._open(request)
        finally:
            self._admissions.remove(admission)
        if admission.aborted:
            self._abort_wire_ids(list(opened.choices))
        return opened

    async def _open(self, request: GenerateRequest) -> OpenRequest:
        arrival_s = time.monotonic()
        self._check_taking()
        check_request(request, self._limits)
        self._requests.check_rid(request.rid)
        prompt_ids: Sequence[int] | None = request.input_ids
        if request.input_embeds is not None:
            prompt_ids = (0,) * request.input_embeds.shape[0]
        elif prompt_ids is None:
            prompt_ids = await self._tokenize(request.text or "", request.add_special_tokens)
            self._check_taking()
        kept_ids = self._fit(prompt_ids)
        check_prompt(request, kept_ids, self._limits)
        truncated_from = len(prompt_ids) if len(kept_ids) < len(prompt_ids) else None
        opened, messages = self._requests.open(request, kept_ids, arrival_s, truncated_from)
        try:
            for message in messages:
                self._send(message)
        except UnicodeEncodeError as error:
            self._requests.close(opened)  # all choices hold the same texts, so none was sent
            raise RequestError(
                f"A text of the request holds half of a surrogate pair ({error.object[:20]!r}), which no encoding can "
                "hold. Send valid Unicode as rid, cache_salt, routing_key, stop and stop_regex."
            ) from error
        return opened

    def _check_taking(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(str(self._failure))
        if self._draining:
            raise QueueFullError("The engine is shutting down and takes no new requests. Send them elsewhere.")

    def _fit(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """Refuse or cut a prompt that is too long, as the scheduler would.

        Here, before ids are looked at and sent on: a prompt of millions of tokens would hold up all other requests.
        """
        info = self.info
        if len(prompt_ids) > info.max_input_tokens and not self._config.scheduler.allow_auto_truncate:
            raise prompt_too_long(len(prompt_ids), info.max_input_tokens, info.context_length, info.max_total_tokens)
        return tuple(prompt_ids[: info.max_input_tokens])

    async def _tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < _LONG_TEXT_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens)
        return await self._loop.run_in_executor(self._tokenizing, self.tokenizer.encode, text, add_special_tokens)

    async def abort(self, rid: str | None) -> None:
        """Abort one request, or all for None. An unknown id is ignored."""
        for admission in self._admissions:
            admission.aborted |= rid in (None, admission.rid)
        if rid is None:
            self._abort_wire_ids(
                [wire_id for open_rid in self._requests.rids for wire_id in self._requests.wire_ids(open_rid)]
            )
        else:
            self._abort_wire_ids(self._requests.wire_ids(rid))

    def _abort_wire_ids(self, wire_ids: list[str]) -> None:
        if self._failure is None:
            for wire_id in wire_ids:
                self._send(Abort(wire_id))

    async def flush_cache(self) -> bool:
        """Empty the prefix cache. Returns False when requests were running, and then nothing was done.

        Raises:
            EngineBusyError: no answer came in time; the cache may still be emptied later.
            EngineDeadError: a process of the engine ended.
        """
        reply: FlushReply = await self._call(FlushCache)
        return reply.flushed

    async def stats(self) -> EngineStats:
        """Gauges and totals as of now.

        Raises:
            EngineBusyError: no answer came in time.
            EngineDeadError: a process of the engine ended.
        """
        reply: StatsReply = await self._call(GetStats)
        return reply.stats

    async def start_profile(self, num_steps: int | None = None) -> None:
        """Record what the scheduler's steps do; see ``AsyncEngine``."""
        await self._profile(functools.partial(StartProfile, num_steps=num_steps))

    async def stop_profile(self) -> str:
        """End the recording; see ``AsyncEngine``."""
        return await self._profile(StopProfile)

    async def _profile(self, kind: Callable[[int], Message]) -> str:
        reply: ProfileReply = await self._call(kind)
        if reply.error is not None:
            raise reply.error.exception()
        return reply.path or ""

    async def _call(self, kind: Callable[[int], Message]) -> Any:
        if self._failure is not None:
            raise EngineDeadError(str(self._failure))
        self._last_call += 1
        call_id = self._last_call
        future = self._calls[call_id] = self._loop.create_future()
        try:
            self._send(kind(call_id))
            async with asyncio.timeout(_ANSWER_S):
                return await future
        except TimeoutError:
            raise EngineBusyError(
                f"The scheduler has not answered for {_ANSWER_S:g} s: a step takes very long, or the process was "
                "stopped. Try again later."
            ) from None
        finally:
            del self._calls[call_id]  # an answer that comes later finds nobody, and is dropped

    def _send(self, message: Message) -> None:
        self._to_scheduler.send(encode(message))

    # --- news from the children ---------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            payload = await cast("Awaitable[bytes]", self._inbox.recv())
            self._take(FRONTEND_DECODER.decode(payload))

    def _receiver_ended(self, receiver: asyncio.Task[None]) -> None:
        """Nobody would hear news any more: rather than leave consumers waiting, the engine ends."""
        error = None if receiver.cancelled() else receiver.exception()
        if error is not None:
            logger.error("taking news of the engine failed", exc_info=error)
            self._fail(EngineDeadError(f"Taking news of the engine failed ({error!r}). Restart the engine."))

    def _take(self, message: ToFrontend) -> None:
        match message:
            case TextBatch():
                for news in message.news:
                    self._requests.deliver(news)
            case Rejected():
                self._requests.reject(message.wire_id, message.error.exception())
            case FlushReply() | ProfileReply() | StatsReply():
                self._answer_call(message)
            case Progress():
                if self._on_progress is not None:
                    self._on_progress(message.part, message.done, message.total)
            case SchedulerReady():
                self._answer_ready("scheduler", message)
            case DetokenizerReady():
                self._answer_ready("detokenizer", message)
            case Failed():
                self._fail(_failure(message))

    def _answer_call(self, reply: FlushReply | ProfileReply | StatsReply) -> None:
        future = self._calls.get(reply.call_id)
        if future is not None and not future.done():
            future.set_result(reply)

    def _answer_ready(self, role: str, message: ToFrontend) -> None:
        if not self._ready[role].done():
            self._ready[role].set_result(message)

    def _child_ended(self, child: Child) -> None:
        """Called from the thread that watches a child."""
        try:
            self._loop.call_soon_threadsafe(self._note_end, child)
        except RuntimeError:
            logger.debug("the %s process ended after the event loop", child.role)

    def _note_end(self, child: Child) -> None:
        if not self._closing:
            self._loop.call_later(_DEATH_NOTE_S, self._report_end, child)

    def _report_end(self, child: Child) -> None:
        if not self._closing:
            what = f"The {child.role} process {child.describe_exit()}; its log says more. Restart the engine."
            self._fail(EngineDeadError(what))

    def _fail(self, error: CardanError) -> None:
        """The engine cannot go on: answer everybody who waits, and end the other children."""
        if self._failure is not None:
            return
        self._failure = error
        dead = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        for future in self._ready.values():
            if not future.done():
                future.set_exception(error)
                future.exception()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(dead)
        self._requests.fail_all(dead)
        if not self._closing:
            if self._info is not None:  # what makes a start fail is raised by it
                logger.error("engine is dead: %s", dead)
            self._dead.set_result(dead)
            for child in self._children:
                child.kill()


def _failure(message: Failed) -> CardanError:
    """What a child's last words mean: an error of its own class, or a bug that its log has in full."""
    error = message.error.exception()
    if not isinstance(error, EngineDeadError):
        return error
    return EngineDeadError(f"The {message.process} process failed ({error}); its log says more. Restart the engine.")
