"""Which unlocked prefix goes first: a policy is a function from a node to its rank, and the lowest goes.

It knows neither the tree's shape nor how many tokens are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from cardan.cache.node import Node
from cardan.errors import ConfigError

Rank: TypeAlias = tuple[int, ...]
EvictionRank: TypeAlias = Callable[[Node], Rank]

SLRU_HITS = 2
"""Hits that bring a node into the protected segment of ``slru``."""

TLRU_TOKENS = 1024
"""Tokens that ``tlru`` is willing to compute again: the time-to-first-token target less a next turn's length."""


def lru(node: Node) -> Rank:
    """Least recently used."""
    return (node.last_access,)


def lfu(node: Node) -> Rank:
    """Least often used; ties by last use."""
    return (node.hits, node.last_access)


def fifo(node: Node) -> Rank:
    """Oldest."""
    return (node.created,)


def mru(node: Node) -> Rank:
    """Most recently used."""
    return (-node.last_access,)


def slru(node: Node) -> Rank:
    """Least recently used of those hit once at most, and only then of the others.

    Source: Karedla, Love, Wherry, "Caching strategies to improve disk system performance", Computer 27(3), 1994.
    """
    return (int(node.hits >= SLRU_HITS), node.last_access)


def priority(node: Node) -> Rank:
    """Lowest request priority; ties by last use."""
    return (node.priority, node.last_access)


def tlru(node: Node) -> Rank:
    """Least recently used of those whose loss costs at most ``TLRU_TOKENS``, and only then of the others.

    What a loss costs is everything from the node's start to the end of the longest sequence that went through.

    Source: Zhang, Li, Moallemi, Peng, "Tail-Optimized Caching for LLM Inference", 2025, Algorithm 1.
    """
    return (int(node.reach - node.start > TLRU_TOKENS), node.last_access)


EVICTION_POLICIES: dict[str, EvictionRank] = {
    "lru": lru,
    "lfu": lfu,
    "fifo": fifo,
    "mru": mru,
    "slru": slru,
    "priority": priority,
    "tlru": tlru,
}
"""Policies by the name that ``--radix-eviction-policy`` takes; plugins add theirs."""


def eviction_policy(name: str) -> EvictionRank:
    """Look a policy up.

    Raises:
        ConfigError: there is none of that name.
    """
    try:
        return EVICTION_POLICIES[name]
    except KeyError:
        known = ", ".join(EVICTION_POLICIES)
        raise ConfigError(f"--radix-eviction-policy must be one of {known}, got {name!r}.") from None
