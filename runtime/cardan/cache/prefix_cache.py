"""What the scheduler asks of a prefix cache, and the cache that keeps nothing.

It knows neither slots' owners nor requests; it is told which prefixes are in use through locks.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from cardan.types import Int32Array

NodeHandle: TypeAlias = Any
"""A place in a prefix cache, given by ``match`` and ``insert`` and taken by ``lock`` and ``unlock``."""

NO_SLOTS: Int32Array = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of some tokens.

    Attributes:
        slots: int32 ``[length]``, where its KV is.
        node: its end, to be locked for as long as the slots are read.
    """

    slots: Int32Array
    node: NodeHandle

    @property
    def length(self) -> int:
        """Tokens that matched."""
        return int(self.slots.shape[0])


@dataclass(frozen=True, slots=True)
class Insertion:
    """What became of tokens that were offered to a cache.

    Attributes:
        kept: leading tokens that the cache holds now; the rest stays the caller's.
        existing: int32 ``[duplicates]``, the slots the cache already had for the first tokens. Where the caller's
            own slots differ from these, they are no longer needed and the caller gives them back.
        node: the end of what is kept.
    """

    kept: int
    existing: Int32Array
    node: NodeHandle


class PrefixCache(abc.ABC):
    """Keeps the KV of prefixes for other requests."""

    @property
    @abc.abstractmethod
    def evictable_tokens(self) -> int:
        """Cached tokens that no one uses."""

    @property
    @abc.abstractmethod
    def locked_tokens(self) -> int:
        """Cached tokens that someone uses."""

    @abc.abstractmethod
    def match(self, tokens: Int32Array, namespace: str | None, limit: int) -> Match:
        """Find the longest cached prefix of ``tokens: [n]``, at most ``limit`` tokens of it, whole pages only.

        The slots stay valid until the next ``evict`` unless the node is locked. It was used just now, but that is no
        hit: whoever takes the slots tells ``note_hit``.
        """

    @abc.abstractmethod
    def note_hit(self, node: NodeHandle) -> None:
        """Count a hit on a prefix, from its start to the node."""

    @abc.abstractmethod
    def peek(self, tokens: Int32Array, namespace: str | None, limit: int) -> tuple[int, NodeHandle]:
        """Length of the match and the node it ends in, without counting it as a use and without a split."""

    @abc.abstractmethod
    def insert(self, tokens: Int32Array, slots: Int32Array, namespace: str | None, priority: int = 0) -> Insertion:
        """Offer the KV of ``tokens: [n]``, computed into ``slots: [n]``.

        Args:
            tokens: a whole sequence from its start.
            slots: where each token's KV is.
            namespace: requests share prefixes only within one.
            priority: of the request, for the ``priority`` eviction policy.
        """

    @abc.abstractmethod
    def lock(self, node: NodeHandle) -> None:
        """Keep a prefix, from its start to the node, until ``unlock``. Locks are counted."""

    @abc.abstractmethod
    def unlock(self, node: NodeHandle) -> None:
        """Take one lock back."""

    @abc.abstractmethod
    def evict(self, num_tokens: int) -> Int32Array:
        """Drop unlocked prefixes until at least ``num_tokens`` are gone or none is left.

        Returns:
            Slots that are free now, whole pages, in the order that ``SlotAllocator.free`` wants.
        """

    @abc.abstractmethod
    def discard(self, tokens: Int32Array, namespace: str | None, keep: int) -> Int32Array:
        """Drop what is cached of ``tokens: [n]`` from position ``keep`` on: KV that is not to be trusted.

        What is still in use stays and is doubted: when other tokens that go through it are discarded later, it goes
        with them, though it begin before their ``keep``.

        Returns:
            Slots that are the caller's to give back, whole pages.
        """

    @abc.abstractmethod
    def held_slots(self) -> Int32Array:
        """Every slot that the cache holds, for checks."""

    @abc.abstractmethod
    def check_invariants(self) -> None:
        """Raise AssertionError when a count or a link is wrong."""


class NoPrefixCache(PrefixCache):
    """Keeps nothing: every match is empty and every insertion stays the caller's."""

    __slots__ = ()

    @property
    def evictable_tokens(self) -> int:
        """Always 0."""
        return 0

    @property
    def locked_tokens(self) -> int:
        """Always 0."""
        return 0

    def match(self, tokens: Int32Array, namespace: str | None, limit: int) -> Match:
        """Find nothing."""
        return Match(NO_SLOTS, None)

    def note_hit(self, node: NodeHandle) -> None:
        """Do nothing."""

    def peek(self, tokens: Int32Array, namespace: str | None, limit: int) -> tuple[int, NodeHandle]:
        """Find nothing."""
        return 0, None

    def insert(self, tokens: Int32Array, slots: Int32Array, namespace: str | None, priority: int = 0) -> Insertion:
        """Keep nothing."""
        return Insertion(0, NO_SLOTS, None)

    def lock(self, node: NodeHandle) -> None:
        """Do nothing."""

    def unlock(self, node: NodeHandle) -> None:
        """Do nothing."""

    def evict(self, num_tokens: int) -> Int32Array:
        """Free nothing."""
        return NO_SLOTS

    def discard(self, tokens: Int32Array, namespace: str | None, keep: int) -> Int32Array:
        """Drop nothing."""
        return NO_SLOTS

    def held_slots(self) -> Int32Array:
        """No slots."""
        return NO_SLOTS

    def check_invariants(self) -> None:
        """Nothing can be wrong."""
