"""The scheduler: requests in, batches out, tokens in, news out.

It has no clock, socket, device or text inside; time comes in as an argument.
"""

from __future__ import annotations

import random

from cardan.cache import PrefixCache
from cardan.errors import QueueFullError, RequestError
from cardan.scheduler.allowed import SampledWith
from cardan.scheduler.assembly import BatchAssembler
from cardan.scheduler.decode import DecodePlanner
from cardan.scheduler.events import LogEvent
from cardan.scheduler.limits import check_request, choose_seed, clamp_output
from cardan.scheduler.memory import RowMemory
from cardan.scheduler.outputs import OutputBatch, SchedulerStats
from cardan.scheduler.pace import Pace
from cardan.scheduler.prefill import PrefillPlanner, decodable_rows, riding_rows
from cardan.scheduler.request import Grammar, Request, RequestState
from cardan.scheduler.reserve import NewTokenRatio
from cardan.scheduler.results import Committer
from cardan.scheduler.settings import SchedulerSettings
from cardan.scheduler.state import Scheduled, State, output_of
from cardan.types import FinishKind, FinishReason, StepResult

MAX_IN_FLIGHT = 2


class Scheduler:
    """Decides who runs when, over one KV pool.

    One turn of the plain loop: ``scheduled = plan(now)``, run ``scheduled.batch``, ``commit(scheduled, result)``.
    One turn of the overlapped loop: ``plan`` and launch step N+1, then read step N and ``commit`` it. Steps are
    committed in the order they were planned, and at most two are in flight. Both loops give the same tokens.

    ``plan`` gives None when nothing can be launched: with a step in flight, commit it and plan again; otherwise wait
    for requests. News that no commit brings (aborts, failures) comes from ``take_outputs``.
    """

    def __init__(self, settings: SchedulerSettings, cache: PrefixCache | None = None) -> None:
        """Make a scheduler with an empty pool.

        Args:
            settings: resolved numbers.
            cache: a prefix cache, instead of the one that the settings ask for.

        Raises:
            ConfigError: the pool does not hold whole pages, or a policy is unknown.
        """
        self._state = State(
            settings=settings,
            memory=RowMemory(settings, cache),
            ratio=NewTokenRatio(settings.schedule_conservativeness),
            rng=random.Random(settings.random_seed),
        )
        self._prefill = PrefillPlanner(self._state)
        self._decode = DecodePlanner(self._state)
        self._assembler = BatchAssembler(self._state)
        self._committer = Committer(self._state)
        self._pace = Pace(self._state)
        self._arrivals = 0
        self._decodes_owed = 0

    # --- requests ---

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it is wrong, or its rid is taken.
            PromptTooLongError: its prompt does not fit.
            QueueFullError: too many requests wait.
        """
        state = self._state
        if request.rid in state.open:
            raise RequestError(f"A request with rid {request.rid!r} is open. Give each request its own.", param="rid")
        check_request(request, state.settings)
        most = state.settings.max_queued_requests
        if most is not None and state.waiting.num_limited >= most:
            raise QueueFullError(f"{most} requests are waiting already (--max-queued-requests). Try again later.")
        clamp_output(request, state.settings)
        request.order = self._arrivals
        self._arrivals += 1
        choose_seed(request, state.settings.random_seed)
        state.open[request.rid] = request
        state.totals["requests"] += 1
        if request.needs_grammar:
            state.waiting.await_grammar(request)
        else:
            state.waiting.append(request)
            state.head_blocked &= not self._may_overtake

    def grammar_ready(self, rid: str, grammar: Grammar | None = None) -> None:
        """A request's grammar was compiled; it joins the queue. An unknown rid is ignored: it was aborted.

        Args:
            rid: the request.
            grammar: its state, for this request alone; None where nobody holds the output to it.
        """
        request = self._state.waiting.grammar_waiting.get(rid)
        if request is not None:
            request.grammar = grammar
            self._state.waiting.remove(request)
            self._state.waiting.append(request)
            self._state.head_blocked &= not self._may_overtake

    def grammar_failed(self, rid: str, message: str) -> None:
        """A request's grammar could not be compiled; it ends with an error. An unknown rid is ignored."""
        if rid in self._state.waiting.grammar_waiting:
            self._end(rid, FinishReason(FinishKind.ERROR, message=message, refused=True))

    def abort(self, rid: str | None) -> list[str]:
        """End one request, or all for None, at once; tokens in flight are dropped.

        Returns:
            Ids of those that ended; ``take_outputs`` has their last news. An unknown id gives none.
        """
        rids = list(self._state.open) if rid is None else [rid] if rid in self._state.open else []
        for one in rids:
            self._end(one, FinishReason(FinishKind.ABORT, message="The request was aborted."))
        return rids

    def fail(self, rid: str, message: str) -> None:
        """End one request with an error; an unknown id is ignored."""
        if rid in self._state.open:
            self._end(rid, FinishReason(FinishKind.ERROR, message=message))

    # --- steps ---

    def plan(self, now_s: float) -> Scheduled | None:
        """Plan the next step, or None when nothing can be launched now."""
        state = self._state
        assert len(state.in_flight) < MAX_IN_FLIGHT, "commit a step before a third is planned"
        self._merge_launched()
        scheduled = self._plan_prefill(now_s) or self._plan_decode(now_s)
        if scheduled is not None:
            state.in_flight.append(scheduled)
        elif not state.in_flight and not self.has_requests:
            state.ratio.reset()
        return scheduled

    def commit(self, scheduled: Scheduled, result: StepResult, sampled: SampledWith | None = None) -> OutputBatch:
        """Take in the result of the oldest step in flight.

        Args:
            scheduled: the step.
            result: what it gave.
            sampled: what its rows sampled with, where that is more than was planned: it tells whose fault a row is
                that gave no token.

        Returns:
            News of its requests, and whatever ``take_outputs`` would give.
        """
        outputs = self._committer.commit(scheduled, result, sampled)
        if self._state.outputs:
            outputs.detailed.extend(self.take_outputs().detailed)
        return outputs

    def take_outputs(self) -> OutputBatch:
        """News that no commit brought: aborts and failures since the last call."""
        detailed, self._state.outputs = self._state.outputs, []
        return OutputBatch(detailed=detailed)

    def take_events(self) -> list[LogEvent]:
        """What is to be logged since the last call."""
        events, self._state.events = self._state.events, []
        return events

    # --- the whole ---

    @property
    def settings(self) -> SchedulerSettings:
        """The numbers it works with."""
        return self._state.settings

    @property
    def has_requests(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._state.open)

    @property
    def has_work(self) -> bool:
        """Whether ``plan``, ``commit`` or ``take_outputs`` has something to do; grammars are others' work."""
        state = self._state
        busy = len(state.open) > len(state.waiting.grammar_waiting)
        return busy or bool(state.in_flight or state.outputs)

    def flush_cache(self) -> bool:
        """Empty the prefix cache. Returns False, and does nothing, while requests are open or steps in flight."""
        state = self._state
        if state.open or state.in_flight:
            return False
        state.memory.make_room(state.memory.slots.num_pages)
        return True

    def evict_cache(self, num_tokens: int) -> int:
        """Give up about so many cached tokens that nobody uses. Returns how many it were."""
        memory = self._state.memory
        before = memory.slots.num_free_tokens
        memory.make_room(memory.slots.num_free_pages + num_tokens // self._state.settings.page_size)
        return memory.slots.num_free_tokens - before

    def stats(self) -> SchedulerStats:
        """Gauges and totals."""
        state = self._state
        totals = dict(state.totals)
        totals["evicted_tokens"] = state.memory.evicted_tokens
        return SchedulerStats(
            num_running=state.num_running,
            num_queued=len(state.waiting) + len(state.waiting.grammar_waiting),
            num_grammar_queued=len(state.waiting.grammar_waiting),
            used_tokens=state.used_tokens,
            cached_tokens=state.memory.cache.evictable_tokens,
            max_total_tokens=state.settings.num_slots,
            new_token_ratio=state.ratio.value,
            gen_throughput=self._pace.gen_throughput,
            totals=totals,
        )

    def check_invariants(self) -> None:
        """Check that no slot, lock or row is lost or held twice. Takes milliseconds.

        Raises:
            AssertionError: one is; this is a bug.
        """
        state = self._state
        state.memory.check_slots()
        state.memory.cache.check_invariants()
        state.lanes.check()
        assert len(state.in_flight) <= MAX_IN_FLIGHT
        alive = {request.row for request in state.open.values() if request.row}
        rows = state.memory.arrays
        assert alive == {row for row in range(len(rows.alive)) if rows.alive[row]}, "rows belong to open requests"
        assert not alive & set(state.memory.table.free_rows()), "a free row is in use"

    # --- inside ---

    @property
    def _may_overtake(self) -> bool:
        """Whether a new request can come before the first that did not fit."""
        settings = self._state.settings
        return settings.schedule_policy != "fcfs" or settings.enable_priority_scheduling

    def _end(self, rid: str, reason: FinishReason) -> None:
        request = self._state.open[rid]
        self._state.finish(request, reason)
        self._state.outputs.append(output_of(request))

    def _merge_launched(self) -> None:
        """Rows of the last prefill pass: their prefixes can be shared, and whole prompts join the running set."""
        state = self._state
        for extend in state.launched:
            request = extend.request
            if request.row != extend.row:
                continue
            state.memory.share(extend.row)
            if extend.final:
                request.state = RequestState.RUNNING
                state.running.add(request)
        state.launched = []

    def _plan_prefill(self, now_s: float) -> Scheduled | None:
        state = self._state
        if self._decodes_owed and decodable_rows(state).shape[0]:
            return None
        extends = self._prefill.form(now_s, riding_rows(state))
        if not extends:
            return None
        scheduled = self._assembler.prefill(extends, riding_rows(state))
        self._decodes_owed = state.settings.prefill_decode_interval
        self._pace.note_prefill(extends, now_s)
        return scheduled

    def _plan_decode(self, now_s: float) -> Scheduled | None:
        state = self._state
        rows = self._decode.choose()
        if rows.shape[0] == 0:
            return None
        scheduled = self._assembler.decode(rows)
        state.ratio.decay()
        self._decodes_owed = max(self._decodes_owed - 1, 0)
        self._pace.note_decode(now_s)
        return scheduled
