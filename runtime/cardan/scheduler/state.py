"""What the parts of the scheduler share, and how a request leaves it.

It decides nothing: planning and committing call it.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from cardan.scheduler.events import FallbackLogged, LogEvent, RetractionLogged
from cardan.scheduler.lanes import Lanes
from cardan.scheduler.memory import RowMemory
from cardan.scheduler.outputs import RequestOutput
from cardan.scheduler.request import Request, RequestState
from cardan.scheduler.reserve import NewTokenRatio
from cardan.scheduler.running import RowIndex, RunningSet
from cardan.scheduler.settings import SchedulerSettings
from cardan.scheduler.waiting import WaitingQueue
from cardan.types import Batch, FinishKind, FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
    """A stretch of one request's prompt in a prefill pass.

    Attributes:
        request: whose.
        row: its row.
        start: position of the first token.
        count: tokens.
        final: the prompt ends here.
        is_new: the request joins with it, and tokens before ``start`` came from the cache.
    """

    request: Request
    row: int
    start: int
    count: int
    final: bool
    is_new: bool

    @property
    def samples(self) -> bool:
        """Whether a token is sampled after it."""
        return self.final and self.request.max_new_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scheduled:
    """A step that was planned: what the device needs, and what ``commit`` needs.

    Attributes:
        batch: the step.
        requests: whose tokens are sampled, in the order of ``batch.sampling``.
        rids: their ids.
        rows: their rows ``[n]``.
        extends: stretches of prompts in it.
        prompt_logprob_counts: how many of the batch's prompt logprobs belong to each of ``extends``.
        pooled: requests that the batch's pooled stretches belong to.
        hidden: requests that the batch's hidden states belong to, in their order, and how many each has.
        is_prefill: whether it was a prefill pass.
    """

    batch: Batch
    requests: list[Request]
    rids: list[str]
    rows: RowIndex
    extends: tuple[Extend, ...] = ()
    prompt_logprob_counts: tuple[int, ...] = ()
    pooled: tuple[Request, ...] = ()
    hidden: tuple[tuple[Request, int], ...] = ()

    @property
    def is_prefill(self) -> bool:
        """Whether it was a prefill pass."""
        return bool(self.extends)


@dataclass(slots=True)
class State:
    """Everything that lives between steps.

    Attributes:
        settings: resolved numbers.
        memory: slots, rows and cache.
        waiting: the queue.
        running: rows that decode.
        ratio: see ``NewTokenRatio``.
        open: all requests that have not ended, by rid.
        half_done: the request whose prompt is prefilled in part.
        launched: stretches of the last prefill pass, whose rows have not joined the running set.
        in_flight: steps planned and not committed, oldest first.
        outputs: news that did not come from a commit.
        events: what is to be logged.
        totals: counters.
        rng: for random orders.
        head_blocked: the first in the queue did not fit, and nothing has changed since.
        lanes: the running rows side by side.
    """

    settings: SchedulerSettings
    memory: RowMemory
    ratio: NewTokenRatio
    rng: random.Random
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    running: RunningSet = field(default_factory=RunningSet)
    open: dict[str, Request] = field(default_factory=dict)
    half_done: Request | None = None
    launched: list[Extend] = field(default_factory=list)
    in_flight: deque[Scheduled] = field(default_factory=deque)
    outputs: list[RequestOutput] = field(default_factory=list)
    events: list[LogEvent] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    head_blocked: bool = False
    lanes: Lanes = field(init=False)

    def __post_init__(self) -> None:
        self.lanes = Lanes(self.running, self.memory.arrays, self.memory.table.max_length)

    @property
    def num_running(self) -> int:
        """Requests that have a row and run."""
        launched = sum(extend.final and extend.request.row != 0 for extend in self.launched)
        return len(self.running) + launched + (self.half_done is not None)

    @property
    def used_tokens(self) -> int:
        """Tokens that are neither free nor evictable."""
        return self.settings.num_slots - self.memory.available_tokens

    def finish(self, request: Request, reason: FinishReason, keep: bool = True) -> None:
        """End a request, wherever it is. With ``keep`` its KV stays in the cache, else it is not to be trusted."""
        if request.state in (RequestState.WAITING, RequestState.GRAMMAR):
            self.waiting.remove(request)
        elif request.row:
            self._leave_row(request, keep)
        if not keep:
            self.memory.distrust(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        del self.open[request.rid]
        self.head_blocked = False
        kind = {FinishKind.ABORT: "aborted_requests", FinishKind.ERROR: "failed_requests"}
        self.totals[kind.get(reason.kind, "finished_requests")] += 1

    def retract(self, request: Request, cause: str) -> None:
        """Take a running request's row away and put it in front of the queue; it keeps its tokens."""
        self.leave_running(request)
        self.requeue(request, cause)

    def leave_running(self, request: Request) -> None:
        """First half of a retraction: the row and the KV go."""
        self._leave_row(request, keep=True)

    def requeue(self, request: Request, cause: str) -> None:
        """Second half of a retraction: the request waits in front."""
        request.num_retractions += 1
        self.waiting.put_back(request)
        self.totals["preemptions" if cause == "priority" else "retractions"] += 1
        self.events.append(
            RetractionLogged(
                rid=request.rid,
                cause=cause,
                num_generated=len(request.output_ids),
                new_token_ratio=self.ratio.value,
            )
        )

    def fall_back(self, reason: str) -> None:
        """Count a fallback, and log it the first time."""
        key = f"fallback:{reason}"
        if key not in self.totals:
            self.events.append(FallbackLogged(reason=reason))
        self.totals[key] += 1

    def _leave_row(self, request: Request, keep: bool) -> None:
        self.running.discard(request.row)
        if self.half_done is request:
            self.half_done = None
        self.memory.release(request, keep)
        self.head_blocked = False


def output_of(
    request: Request,
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprobs | None, ...] = (),
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = (),
) -> RequestOutput:
    """News of a request with its totals as they are now."""
    first_run_s = request.first_run_s
    return RequestOutput(
        rid=request.rid,
        new_token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=request.finish_reason,
        num_prompt_tokens=request.num_prompt,
        num_cached_tokens=request.cached_tokens,
        num_retractions=request.num_retractions,
        max_new_tokens_clamped=request.max_new_tokens_clamped,
        truncated_from=request.truncated_from,
        embedding=request.embedding() if request.finish_reason is not None else (),
        hidden=request.take_hidden() if request.hidden else (),
        queue_s=0.0 if first_run_s is None else max(0.0, first_run_s - request.arrival_s),
    )
