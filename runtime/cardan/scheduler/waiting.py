"""The waiting requests: retracted ones in front, then the others in the order of their arrival.

It does not know who fits.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from itertools import chain

from cardan.scheduler.ordering import CACHE_AWARE_LIMIT, OrderingContext, SchedulePolicy
from cardan.scheduler.request import Request, RequestState


class WaitingQueue:
    """Requests that wait to be prefilled, and those that wait for their grammar.

    Attributes:
        num_tokens: prompt and output tokens of all waiting requests.
    """

    def __init__(self) -> None:
        self._retracted: list[Request] = []
        self._fresh: dict[str, Request] = {}
        self._grammar: dict[str, Request] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._retracted) + len(self._fresh)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._retracted, self._fresh.values())

    @property
    def num_limited(self) -> int:
        """Requests that count against the queue limit: all but retracted ones."""
        return len(self._fresh) + len(self._grammar)

    @property
    def grammar_waiting(self) -> dict[str, Request]:
        """Requests whose grammar is not ready, by rid."""
        return self._grammar

    def append(self, request: Request) -> None:
        """Put a request at the end."""
        request.state = RequestState.WAITING
        self._fresh[request.rid] = request
        self.num_tokens += request.num_prompt

    def put_back(self, request: Request) -> None:
        """Put a retracted request in front; the earliest arrival goes first among them."""
        request.state = RequestState.WAITING
        bisect.insort(self._retracted, request, key=lambda other: other.order)
        self.num_tokens += request.num_prompt + len(request.output_ids)

    def await_grammar(self, request: Request) -> None:
        """Keep a request until its grammar is ready."""
        request.state = RequestState.GRAMMAR
        self._grammar[request.rid] = request

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        if self._grammar.pop(request.rid, None) is not None:
            return
        if self._fresh.pop(request.rid, None) is None:
            self._retracted.remove(request)
        self.num_tokens -= request.num_prompt + len(request.output_ids)

    def note_token(self, count: int = 1) -> None:
        """A waiting request got a token that was in flight, or tokens that follow from it."""
        self.num_tokens += count

    def ordered(self, policy: SchedulePolicy, by_priority: bool, context: OrderingContext) -> Iterable[Request]:
        """Requests in the order they are tried: by priority where asked, retracted first, then by policy.

        The queue must not change while this is read.
        """
        fresh: Iterable[Request] = self._fresh.values()
        too_many = policy.needs_cache and len(self) > CACHE_AWARE_LIMIT
        if policy.order_matters and not too_many:
            fresh = policy.order(list(fresh), context)
        everyone = chain(self._retracted, fresh)
        return sorted(everyone, key=lambda request: -request.priority) if by_priority else everyone
