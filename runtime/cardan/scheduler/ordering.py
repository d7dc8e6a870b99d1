"""In which order waiting requests are tried.

It knows neither memory nor rows: an ordering only sorts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cardan.cache import NodeHandle, PrefixCache
from cardan.scheduler.request import Request

CACHE_AWARE_LIMIT = 128
"""Waiting requests above which looking every prefix up costs more than it brings."""

SERVICE_S_PER_PROMPT_TOKEN = 0.0005
SERVICE_S_PER_OUTPUT_TOKEN = 0.02
"""What ``hrrn`` takes a token to cost. Only the ratio to waiting times matters, so rough numbers do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderingContext:
    """What an ordering may look at.

    Attributes:
        cache: the prefix cache.
        now_s: the time.
        rng: for random orders.
        routing_keys: how many running requests have each routing key.
    """

    cache: PrefixCache
    now_s: float
    rng: random.Random
    routing_keys: Mapping[str, int]

    def peek(self, request: Request) -> tuple[int, NodeHandle]:
        """Tokens of a request that are cached, and where its cached prefix ends."""
        return self.cache.peek(request.sequence(), request.cache_salt, request.match_limit())


Ordering: TypeAlias = Callable[[Sequence[Request], OrderingContext], list[Request]]


@dataclass(frozen=True, slots=True)
class SchedulePolicy:
    """An ordering and what it needs.

    Attributes:
        order: sorts; ties keep the order of arrival.
        needs_cache: makes no sense without a prefix cache, and falls back to fcfs with a long queue.
        needs_running: looks at the routing keys of running requests.
    """

    order: Ordering
    needs_cache: bool = False
    needs_running: bool = False

    @property
    def order_matters(self) -> bool:
        """Whether it does more than keep the order of arrival."""
        return self.order is not fcfs


def fcfs(requests: Sequence[Request], context: OrderingContext) -> list[Request]:
    """First come, first served."""
    return list(requests)


def longest_prefix(requests: Sequence[Request], context: OrderingContext) -> list[Request]:
    """Longest cached prefix first."""
    return sorted(requests, key=lambda request: -context.peek(request)[0])


def dfs_weight(requests: Sequence[Request], context: OrderingContext) -> list[Request]:
    """Depth first through the tree, into the branch with the most waiting requests first.

    Requests of one branch run together, so that their prefix stays.
    """
    paths: list[tuple[tuple[int, ...], Request]] = []
    weights: Counter[int] = Counter()
    for request in requests:
        _, node = context.peek(request)
        path: list[int] = []
        while node is not None:
            path.append(id(node))
            node = node.parent
        path.reverse()
        weights.update(path)
        paths.append((tuple(path), request))
    first_seen: dict[int, int] = {}
    for path_ids, _ in paths:
        for node_id in path_ids:
            first_seen.setdefault(node_id, len(first_seen))
    after_children = (1, 0)
    paths.sort(key=lambda entry: [*((-weights[node], first_seen[node]) for node in entry[0]), after_children])
    return [request for _, request in paths]


def longest_output(requests: Sequence[Request], context: OrderingContext) -> list[Request]:
    """Longest allowed output first."""
    return sorted(requests, key=lambda request: -request.max_new_tokens)


def highest_response_ratio(requests: Sequence[Request], context: OrderingContext) -> list[Request]:
    """Highest ``(waiting + service) / service`` first, so short ones go early and long ones do not starve.

    Source: Brinch Hansen, "An analysis of response ratio scheduling", IFIP 1971.
    """

    def ratio(request: Request) -> float:
        service_s = SERVICE_S_PER_PROMPT_TOKEN * request.num_prompt + SERVICE_S_PER_OUTPUT_TOKEN * max(
            request.num_remaining, 1
        )
        return (max(context.now_s - request.arrival_s, 0.0) + service_s) / service_s

    return sorted(requests, key=lambda request: -ratio(request))


def shortest_prefill(requests: Sequence[Request], context: OrderingContext) -> list[Request]:
    """Fewest prompt tokens to compute first; with a long queue the cache is not asked."""
    if len(requests) > CACHE_AWARE_LIMIT:
        return sorted(requests, key=lambda request: request.num_prompt)
    return sorted(requests, key=lambda request: request.sequence().shape[0] - context.peek(request)[0])


def random_order(requests: Sequence[Request], context: OrderingContext) -> list[Request]:
    """Any order."""
    shuffled = list(requests)
    context.rng.shuffle(shuffled)
    return shuffled


def by_priority(requests: Sequence[Request], context: OrderingContext) -> list[Request]:
    """Highest priority first."""
    return sorted(requests, key=lambda request: -request.priority)


def by_routing_key(requests: Sequence[Request], context: OrderingContext) -> list[Request]:
    """Keys with the most running requests first, each key's requests together, those without a key last."""

    def rank(request: Request) -> tuple[bool, int, str]:
        key = request.routing_key
        return (key is None, -context.routing_keys.get(key or "", 0), key or "")

    return sorted(requests, key=rank)


SCHEDULE_POLICIES: dict[str, SchedulePolicy] = {
    "fcfs": SchedulePolicy(fcfs),
    "lpm": SchedulePolicy(longest_prefix, needs_cache=True),
    "dfs-weight": SchedulePolicy(dfs_weight, needs_cache=True),
    "lof": SchedulePolicy(longest_output),
    "hrrn": SchedulePolicy(highest_response_ratio),
    "shortest-prefill-first": SchedulePolicy(shortest_prefill),
    "random": SchedulePolicy(random_order),
    "priority": SchedulePolicy(by_priority),
    "routing-key": SchedulePolicy(by_routing_key, needs_running=True),
}
"""Policies by the name that ``--schedule-policy`` takes."""
