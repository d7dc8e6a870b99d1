"""What all routes of one server share: the engine, the configuration, metrics, and the requests that are open.

It knows no route and no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cardan.config import EngineConfig
from cardan.engine.api import AsyncEngine
from cardan.errors import PromptTooLongError, RequestError, UnknownModelError
from cardan.server.http.bodies import shorten
from cardan.server.page.recent import RecentRequests
from cardan.server.prompts import LONG_TEXT
from cardan.server.watching.metrics import ServerMetrics
from cardan.server.watching.watchers import WatcherMaker


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request from when its body was read until its answer has ended.

    Attributes:
        request_id: the id that the client knows.
        engine_ids: those that the engine knows or will know, one a prompt.
        aborted: those of them that somebody aborted; what has not reached the engine by then must not start.
        num_holders: blocks that it lives for; it is known while there is one.
    """

    request_id: str
    engine_ids: tuple[str, ...]
    aborted: set[str] = field(default_factory=set)
    num_holders: int = 0


@dataclass(slots=True)
class ServerState:
    """One server's shared state.

    Attributes:
        engine: what answers.
        config: as given at the start.
        metrics: what ``/metrics`` shows.
        watch: makers of what looks on while a request runs.
        recent: the last requests, for the page.
        created: Unix time of the start, in whole seconds.
        draining: set when no new requests are taken any more.
        live: requests that run, or are on their way to the engine, by the id that the client knows.
    """

    engine: AsyncEngine
    config: EngineConfig
    metrics: ServerMetrics
    watch: tuple[WatcherMaker, ...] = ()
    recent: RecentRequests = field(default_factory=RecentRequests)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    live: dict[str, LiveRequest] = field(default_factory=dict)
    _longest_token: int | None = None

    @property
    def model_name(self) -> str:
        """The name that requests use."""
        return self.engine.info.model_name

    @property
    def num_open(self) -> int:
        """HTTP requests that generate right now, or whose prompts are being prepared."""
        return len(self.live)

    def check_accepting(self) -> None:
        """Refuse new work while shutting down.

        Raises:
            HTTPException: 503.
        """
        if self.draining:
            raise HTTPException(
                503,
                "The server is shutting down and takes no new requests.",
                headers={"Retry-After": "5", "Connection": "close"},
            )

    def check_model(self, name: str | None) -> None:
        """Check the model that a request names; a missing or empty name means the served one.

        Raises:
            UnknownModelError: it is another.
        """
        if name and name != self.model_name:
            raise UnknownModelError(
                f"The model '{shorten(name)}' does not exist here; this server serves '{self.model_name}'.",
                param="model",
                code="model_not_found",
            )

    def check_scheduling(self, priority: int, routing_key: str | None) -> None:
        """Refuse a priority or routing key that would have no effect.

        Raises:
            RequestError: priority scheduling, or the routing-key policy, is off.
        """
        scheduler = self.config.scheduler
        if priority and not scheduler.enable_priority_scheduling:
            raise RequestError(
                f"'priority' is {priority}, but this server runs without priority scheduling. "
                "Leave it out, or start the server with --enable-priority-scheduling.",
                param="priority",
                code="unsupported_parameter",
            )
        if routing_key is not None and scheduler.schedule_policy != "routing-key":
            raise RequestError(
                f"'routing_key' has no effect under --schedule-policy {scheduler.schedule_policy}. "
                "Leave it out, or start the server with --schedule-policy routing-key.",
                param="routing_key",
                code="unsupported_parameter",
            )

    def check_ids_length(self, value: object, param: str) -> None:
        """Refuse prompts of ids that cannot fit, before time is spent on looking at each of them.

        Raises:
            PromptTooLongError: one has more entries than a prompt may have tokens.
        """
        most_tokens = self.engine.info.max_input_tokens
        if self.config.scheduler.allow_auto_truncate or not isinstance(value, list):
            return
        prompts = value if value and isinstance(value[0], list) else [value]
        for ids in prompts:
            if isinstance(ids, list) and len(ids) > most_tokens and isinstance(ids[0], int):
                raise PromptTooLongError(
                    f"The prompt has {len(ids)} token ids. At most {most_tokens} fit. Shorten the prompt.", param=param
                )

    def check_text(self, text: str, param: str) -> None:
        """Refuse a text that cannot fit, however well it tokenizes, before time is spent on tokenizing it.

        Raises:
            PromptTooLongError: even with the longest tokens it would be too long.
        """
        if len(text) <= LONG_TEXT or self.config.scheduler.allow_auto_truncate:
            return
        if self._longest_token is None:
            tokenizer = self.engine.tokenizer
            self._longest_token = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
        most_tokens = self.engine.info.max_input_tokens
        if len(text) > most_tokens * self._longest_token:
            raise PromptTooLongError(
                f"The prompt has {len(text)} characters. At most {most_tokens} tokens fit, and a token of this model "
                f"has at most {self._longest_token} bytes. Shorten the prompt.",
                param=param,
            )

    @contextlib.contextmanager
    def preparing(self, request_id: str, engine_ids: tuple[str, ...] = ()) -> Iterator[LiveRequest]:
        """Know of a request that is not open yet, so that it can be aborted; the block ends when it is, or fails.

        Args:
            request_id: the id that the client knows.
            engine_ids: those of its prompts; its own where it has but one.

        Raises:
            RequestError: the id is in use.
        """
        with self._holding(LiveRequest(request_id, engine_ids or (request_id,))) as live:
            yield live

    @contextlib.contextmanager
    def opened(self, live: LiveRequest) -> Iterator[None]:
        """Count a request as open while the block runs, be it known already or not.

        Raises:
            RequestError: its id is another's.
        """
        with self._holding(live):
            yield

    @contextlib.contextmanager
    def _holding(self, live: LiveRequest) -> Iterator[LiveRequest]:
        name = live.request_id
        if self.live.setdefault(name, live) is not live:
            raise RequestError(
                f"The request id '{shorten(name)}' is in use by an open request. Choose another.",
                param="rid",
                code="duplicate_rid",
            )
        live.num_holders += 1
        try:
            yield live
        finally:
            live.num_holders -= 1
            if not live.num_holders:
                del self.live[name]

    async def abort(self, request_id: str | None) -> None:
        """Abort what an id stands for, or everything for None, be it open or still being prepared."""
        for live in self.live.values():
            named = request_id in (None, live.request_id)
            live.aborted.update(one for one in live.engine_ids if named or one == request_id)
        if request_id is None:
            await self.engine.abort(None)
            return
        found = self.live.get(request_id)
        for engine_id in (request_id,) if found is None else found.engine_ids:
            await self.engine.abort(engine_id)

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until no request is open. Returns False when time ran out first."""
        deadline = time.monotonic() + timeout_s
        while self.num_open:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True


def state_of(request: Request) -> ServerState:
    """The state of the server that a request came to."""
    state: ServerState = request.app.state.server
    return state
