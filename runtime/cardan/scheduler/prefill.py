"""Forms prefill passes: who is admitted, who waits, and how long prompts are cut.

It does not build arrays and does not know how decode rows are chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from cardan.cache import Match
from cardan.scheduler.admission import AdmissionBudget, Verdict
from cardan.scheduler.deferral import SharedPrefixes
from cardan.scheduler.ordering import CACHE_AWARE_LIMIT, SCHEDULE_POLICIES, OrderingContext
from cardan.scheduler.request import Request, RequestState
from cardan.scheduler.running import RowIndex
from cardan.scheduler.state import Extend, State

NO_ROWS: RowIndex = np.empty(0, dtype=np.intp)


class PrefillPlanner:
    """Forms one prefill pass at a time."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._policy = SCHEDULE_POLICIES[state.settings.schedule_policy]
        self._shares = not state.settings.disable_radix_cache

    def form(self, now_s: float, riding: RowIndex) -> list[Extend]:
        """Form a pass, and take rows and slots for it. Empty when there is nothing to prefill or no room.

        Args:
            now_s: the time.
            riding: rows that decode in the same pass.
        """
        state = self._state
        idle = not state.in_flight and len(state.running) == 0
        if state.half_done is None and (len(state.waiting) == 0 or (state.head_blocked and not idle)):
            return []
        tokens = int(state.memory.arrays.tokens_to_compute(riding).sum())
        budget = AdmissionBudget(state, tokens, state.memory.pages_to_decode(riding))
        shared = SharedPrefixes(state.settings.page_size)
        extends: list[Extend] = []
        if state.half_done is not None:
            extends += self._go_on(state.half_done, budget, shared)
        if state.half_done is None or extends:
            extends += self._admit_waiting(now_s, budget, shared)
        self._take_slots(extends, budget.riding_tokens)
        return extends

    # --- the half-done request ---

    def _go_on(self, request: Request, budget: AdmissionBudget, shared: SharedPrefixes) -> list[Extend]:
        """The next chunk of the half-done request: it goes on with whatever room there is."""
        memory, page = self._state.memory, self._state.settings.page_size
        start = int(memory.arrays.seq_len[request.row])
        left = request.sequence().shape[0] - start
        room = (memory.available_tokens - budget.riding_tokens) // page * page
        count = budget.cut(left)
        if -(-count // page) * page > room:
            count = max(room, 0)
        if count == 0:
            return []
        shared.note_half_done(request, start)
        budget.charge(request, count, count == left)
        final = count == left
        return [Extend(request=request, row=request.row, start=start, count=count, final=final, is_new=False)]

    # --- the queue ---

    def _admit_waiting(self, now_s: float, budget: AdmissionBudget, shared: SharedPrefixes) -> list[Extend]:
        state = self._state
        admitted: list[Extend] = []
        preempted: list[Request] = []
        for request in self._ordered(now_s):
            verdict = self._try(request, budget, shared, admitted)
            if verdict is Verdict.NO_ROOM and (victims := self._victims(request, budget)):
                for victim in victims:
                    state.leave_running(victim)
                preempted += victims
                verdict = self._try(request, budget, shared, admitted)
            if verdict in (Verdict.NO_ROOM, Verdict.PASS_FULL):
                state.head_blocked = verdict is Verdict.NO_ROOM and not admitted and not preempted
                break
            if admitted and not admitted[-1].final:
                break
        for extend in admitted:
            state.waiting.remove(extend.request)
            self._note_admitted(extend, now_s)
        for victim in preempted:
            state.requeue(victim, "priority")
        return admitted

    def _ordered(self, now_s: float) -> Iterable[Request]:
        state, policy = self._state, self._policy
        if policy.needs_cache and len(state.waiting) > CACHE_AWARE_LIMIT:
            state.fall_back(f"{state.settings.schedule_policy} ran as fcfs, more than {CACHE_AWARE_LIMIT} waiting")
        keys = (request.routing_key for request in state.running.values())
        context = OrderingContext(
            cache=state.memory.cache,
            now_s=now_s,
            rng=state.rng,
            routing_keys=Counter(key for key in keys if key is not None) if policy.needs_running else {},
        )
        return state.waiting.ordered(policy, state.settings.enable_priority_scheduling, context)

    def _try(
        self, request: Request, budget: AdmissionBudget, shared: SharedPrefixes, admitted: list[Extend]
    ) -> Verdict:
        """Admit a candidate if it fits; its matched prefix stays locked only then."""
        memory = self._state.memory
        if memory.table.num_free == 0:
            return Verdict.NO_ROOM
        sequence = request.sequence()
        match = memory.cache.match(sequence, request.cache_salt, request.match_limit())
        memory.cache.lock(match.node)
        uncached = int(sequence.shape[0]) - match.length
        verdict = budget.judge(request, uncached)
        chunk = self._state.settings.chunked_prefill_size
        if verdict is Verdict.FITS and self._shares and shared.defers(request, match.node, match.length, chunk):
            self._state.totals["deferrals"] += 1
            verdict = Verdict.DEFERRED
        if verdict is not Verdict.FITS:
            memory.cache.unlock(match.node)
            return verdict
        memory.cache.note_hit(match.node)
        shared.note(request, match.node, match.length)
        admitted.append(self._admit(request, match, budget))
        return verdict

    def _admit(self, request: Request, match: Match, budget: AdmissionBudget) -> Extend:
        uncached = int(request.sequence().shape[0]) - match.length
        count = budget.cut(uncached)
        final = count == uncached
        budget.charge(request, count, final)
        self._state.memory.admit(request, match)
        return Extend(request=request, row=request.row, start=match.length, count=count, final=final, is_new=True)

    def _note_admitted(self, extend: Extend, now_s: float) -> None:
        request, totals = extend.request, self._state.totals
        request.state = RequestState.PREFILLING
        request.prefill_start = extend.start
        request.computed_from = min(request.computed_from, extend.start)
        if request.first_run_s is None:
            request.first_run_s = now_s
            request.cached_tokens = extend.start
            totals["cached_prompt_tokens"] += extend.start
            totals["prompt_tokens"] += request.num_prompt

    # --- preemption ---

    def _victims(self, request: Request, budget: AdmissionBudget) -> list[Request]:
        """Running requests whose rows and memory a more urgent one may take: lowest priority and newest first.

        Empty when all of them together would not be enough.
        """
        state = self._state
        if not state.settings.enable_priority_scheduling:
            return []
        limit = request.priority - state.settings.priority_scheduling_preemption_threshold
        arrays = state.memory.arrays
        lower = [
            other
            for other in state.running.values()
            if other.priority < limit and arrays.prefix_len[other.row] <= arrays.safe_len[other.row]
        ]
        lower.sort(key=lambda other: (other.priority, -other.order))
        missing = budget.price(request, int(request.sequence().shape[0])) - budget.tokens_left + 1
        victims: list[Request] = []
        for other in lower:
            if missing <= 0 and victims:
                break
            victims.append(other)
            missing -= int(arrays.seq_len[other.row])
        return victims if missing <= 0 else []

    # --- slots ---

    def _take_slots(self, extends: list[Extend], riding_tokens: int) -> None:
        state = self._state
        page = state.settings.page_size
        pages = sum(-(-extend.count // page) for extend in extends) + riding_tokens // page
        enough = state.memory.make_room(pages)
        assert enough or not extends, "admission let more in than there are slots"
        for extend in extends:
            state.memory.extend(extend.row, extend.count)
            if extend.final and state.half_done is extend.request:
                state.half_done = None
            if not extend.final:
                assert state.half_done in (None, extend.request), "only one prompt is prefilled in part"
                state.half_done = extend.request
        state.launched = list(extends)


def riding_rows(state: State) -> RowIndex:
    """Rows that decode in a prefill pass when passes are mixed: all that have tokens left."""
    if not state.settings.enable_mixed_chunk:
        return NO_ROWS
    return decodable_rows(state)


def decodable_rows(state: State) -> RowIndex:
    """Running rows but for those that end by length with a step in flight, or wait for it to be read."""
    rows, arrays = state.running.rows, state.memory.arrays
    if state.lanes.all_decode:
        return rows
    left = arrays.generated[rows] + arrays.pending[rows] < arrays.max_new[rows]
    left &= ~arrays.held[rows]
    decodable: RowIndex = rows[left]
    return decodable
