from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cardan.cache import EVICTION_POLICIES, NoPrefixCache, RadixTree
from cardan.types import Int32Array


def ints(*values: int) -> Int32Array:
    return np.asarray(values, dtype=np.int32)


def run(start: int, count: int) -> Int32Array:
    return np.arange(start, start + count, dtype=np.int32)


def test_a_match_is_the_longest_cached_prefix() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(ints(1, 2, 3, 4), ints(11, 12, 13, 14), None)
    assert tree.match(ints(1, 2, 3, 4, 5), None, 5).slots.tolist() == [11, 12, 13, 14]
    assert tree.match(ints(1, 2, 9), None, 3).slots.tolist() == [11, 12]
    assert tree.match(ints(9, 2), None, 2).length == 0


def test_a_match_never_goes_past_its_limit() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(ints(1, 2, 3), ints(11, 12, 13), None)
    assert tree.match(ints(1, 2, 3), None, 2).slots.tolist() == [11, 12]
    assert tree.match(ints(1, 2, 3), None, 0).length == 0
    assert tree.match(ints(1, 2, 3), None, -1).length == 0


def test_an_edge_is_split_where_two_sequences_part_and_locks_hold_on_both_sides() -> None:
    tree = RadixTree(page_size=1)
    whole = tree.insert(ints(1, 2, 3, 4), run(11, 4), None)
    tree.lock(whole.node)
    half = tree.match(ints(1, 2, 8), None, 3)
    tree.lock(half.node)
    tree.check_invariants()
    assert (tree.locked_tokens, tree.evictable_tokens) == (4, 0)
    tree.unlock(whole.node)
    assert (tree.locked_tokens, tree.evictable_tokens) == (2, 2)
    assert tree.evict(100).tolist() == [13, 14]
    tree.unlock(half.node)
    assert tree.evict(100).tolist() == [11, 12]
    tree.check_invariants()


def test_a_prefix_is_discarded_but_for_what_others_computed_before_it() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(ints(1, 2), run(11, 2), None)
    tree.insert(ints(1, 2, 3, 4, 5, 6), run(11, 6), None)
    tree.insert(ints(1, 2, 3, 4, 9), ints(11, 12, 13, 14, 99), None)
    assert tree.discard(ints(1, 2, 3, 4, 5, 6, 7), "other", 2).tolist() == []
    assert tree.discard(ints(1, 2, 3, 4, 5, 6, 7), None, 2).tolist() == [15, 16]
    tree.check_invariants()
    assert sorted(tree.discard(ints(1, 2, 3, 4, 9), None, 2).tolist()) == [13, 14, 99]
    assert tree.discard(ints(1, 2, 3, 4, 9), None, 2).tolist() == []
    assert tree.match(ints(1, 2, 3, 4), None, 4).slots.tolist() == [11, 12]
    tree.check_invariants()
    assert tree.evict(100).tolist() == [11, 12]
    assert NoPrefixCache().discard(ints(1, 2), None, 0).tolist() == []


def test_what_was_in_use_when_it_was_discarded_goes_with_the_next_that_is() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(ints(1, 2), run(11, 2), None)
    whole = tree.insert(ints(1, 2, 3, 4), run(11, 4), None)
    tree.lock(whole.node)
    assert tree.discard(ints(1, 2, 3, 4), None, 2).tolist() == []
    part = tree.match(ints(1, 2, 3, 9), None, 3)
    tree.insert(ints(1, 2, 3, 9), ints(11, 12, 13, 19), None)
    tree.unlock(whole.node)
    assert part.slots.tolist() == [11, 12, 13], "a doubted node was cut in two"
    assert tree.discard(ints(1, 2, 3, 4, 8), None, 4).tolist() == [14]
    assert tree.discard(ints(1, 2, 3, 9), None, 3).tolist() == [19, 13]
    assert tree.match(ints(1, 2, 3), None, 3).slots.tolist() == [11, 12]
    tree.check_invariants()


def test_an_insertion_names_the_slots_that_were_there_before() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(ints(1, 2, 3), ints(11, 12, 13), None)
    again = tree.insert(ints(1, 2, 7, 8), ints(21, 22, 23, 24), None)
    assert again.kept == 4
    assert again.existing.tolist() == [11, 12]
    assert tree.match(ints(1, 2, 7, 8, 9), None, 5).slots.tolist() == [11, 12, 23, 24]


def test_pages_are_kept_and_matched_whole() -> None:
    tree = RadixTree(page_size=4)
    inserted = tree.insert(run(0, 10), run(100, 10), None)
    assert inserted.kept == 8
    assert tree.match(run(0, 10), None, 9).slots.tolist() == list(range(100, 108))
    assert tree.match(run(0, 10), None, 7).slots.tolist() == list(range(100, 104))
    different = run(0, 8)
    different[6] = 99
    assert tree.match(different, None, 8).length == 4
    assert tree.insert(run(0, 3), run(100, 3), None).kept == 0
    tree.check_invariants()


def test_pages_that_begin_alike_and_differ_later_are_two_children() -> None:
    tree = RadixTree(page_size=2)
    tree.insert(ints(1, 2), ints(10, 11), None)
    tree.insert(ints(1, 3), ints(20, 21), None)
    assert tree.match(ints(1, 3, 0), None, 3).slots.tolist() == [20, 21]
    assert tree.match(ints(1, 2, 0), None, 3).slots.tolist() == [10, 11]


def test_namespaces_share_nothing_and_vanish_when_empty() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(ints(1, 2), ints(11, 12), "a")
    assert tree.match(ints(1, 2, 3), "b", 3).length == 0
    assert tree.match(ints(1, 2, 3), None, 3).length == 0
    assert tree.match(ints(1, 2, 3), "a", 3).length == 2
    tree.evict(2)
    assert not tree._roots, "salts that are gone must not pile up"


def test_a_locked_empty_namespace_vanishes_when_it_is_unlocked() -> None:
    tree = RadixTree(page_size=1)
    inserted = tree.insert(ints(1), ints(11), "a")
    empty = tree.match(ints(5), "a", 1)
    tree.lock(empty.node)
    tree.evict(1)
    assert inserted.node.parent is None
    tree.unlock(empty.node)
    assert not tree._roots


def test_a_peek_changes_nothing() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(ints(1, 2, 3), ints(11, 12, 13), None)
    before = [(node.hits, node.last_access) for node in tree._walk()]
    assert tree.peek(ints(1, 2, 9), None, 3)[0] == 2
    assert tree.peek(ints(1, 2, 3), "other", 3) == (0, None)
    assert [(node.hits, node.last_access) for node in tree._walk()] == before


def test_a_parent_can_be_evicted_once_its_children_are_gone() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(ints(1, 2), ints(11, 12), None)
    tree.insert(ints(1, 2, 3), ints(11, 12, 13), None)
    assert sorted(tree.evict(3).tolist()) == [11, 12, 13]
    assert (tree.evictable_tokens, tree.held_slots().size) == (0, 0)


def test_unlocking_too_often_is_a_bug() -> None:
    tree = RadixTree(page_size=1)
    node = tree.insert(ints(1), ints(11), None).node
    with pytest.raises(AssertionError, match="more often than locked"):
        tree.unlock(node)


def test_the_heap_of_leaves_does_not_grow_with_use() -> None:
    tree = RadixTree(page_size=1)
    tree.insert(ints(1, 2), ints(11, 12), None)
    for _ in range(1000):
        match = tree.match(ints(1, 2, 3), None, 3)
        tree.lock(match.node)
        tree.unlock(match.node)
    assert len(tree._heap) < 100
    assert tree.evict(2).tolist() == [11, 12]


def test_the_cache_that_keeps_nothing() -> None:
    cache = NoPrefixCache()
    inserted = cache.insert(ints(1, 2), ints(11, 12), None)
    assert (inserted.kept, inserted.existing.size) == (0, 0)
    cache.lock(inserted.node)
    cache.unlock(inserted.node)
    assert cache.match(ints(1, 2), None, 2).length == 0
    assert cache.peek(ints(1, 2), None, 2) == (0, None)
    assert cache.evict(5).size == cache.held_slots().size == 0
    assert (cache.evictable_tokens, cache.locked_tokens) == (0, 0)
    cache.check_invariants()


class TreeMachine(RuleBasedStateMachine):
    """A tree beside a plain dictionary from prefixes to slots, as far as nothing was evicted."""

    @initialize(page=st.sampled_from([1, 2, 4]), policy=st.sampled_from(sorted(EVICTION_POLICIES)))
    def start(self, page: int, policy: str) -> None:
        self.page = page
        self.tree = RadixTree(page, policy)
        self.known: dict[tuple[str | None, tuple[int, ...], int], int] = {}
        self.free = set(range(page, 400))
        self.locks: list[tuple[object, list[int]]] = []

    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=14)
    namespaces = st.sampled_from([None, "salt"])

    def place(self, tokens: list[int], namespace: str | None, length: int) -> tuple[str | None, tuple[int, ...], int]:
        """What the token at the end of ``length`` tokens is known by: its page's whole prefix."""
        return namespace, tuple(tokens[: -(-length // self.page) * self.page]), length

    def model_match(self, tokens: list[int], namespace: str | None, limit: int) -> list[int]:
        slots: list[int] = []
        for length in range(1, limit // self.page * self.page + 1):
            slot = self.known.get(self.place(tokens, namespace, length))
            if slot is None:
                break
            slots.append(slot)
        return slots[: len(slots) // self.page * self.page]

    @rule(tokens=tokens, namespace=namespaces)
    def insert(self, tokens: list[int], namespace: str | None) -> None:
        before = self.model_match(tokens, namespace, len(tokens))
        fresh = sorted(self.free)[: len(tokens)]
        if len(fresh) < len(tokens):
            return
        slots = before + fresh[len(before) :]
        inserted = self.tree.insert(np.asarray(tokens, np.int32), np.asarray(slots, np.int32), namespace)
        assert inserted.kept == len(tokens) // self.page * self.page
        assert inserted.existing.tolist() == before
        for length in range(1, inserted.kept + 1):
            self.known[self.place(tokens, namespace, length)] = slots[length - 1]
        self.free -= set(slots[: inserted.kept])

    @rule(tokens=tokens, namespace=namespaces, less=st.integers(0, 3), lock=st.booleans())
    def match(self, tokens: list[int], namespace: str | None, less: int, lock: bool) -> None:
        limit = len(tokens) - less
        array = np.asarray(tokens, np.int32)
        expected = self.model_match(tokens, namespace, limit)
        assert self.tree.peek(array, namespace, limit)[0] == len(expected)
        match = self.tree.match(array, namespace, limit)
        assert match.slots.tolist() == expected
        if lock:
            self.tree.lock(match.node)
            self.locks.append((match.node, expected))

    @precondition(lambda self: self.locks)
    @rule(which=st.integers(0, 1000))
    def unlock(self, which: int) -> None:
        node, _ = self.locks.pop(which % len(self.locks))
        self.tree.unlock(node)

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        could = self.tree.evictable_tokens
        freed = self.tree.evict(count).tolist()
        assert len(freed) >= min(count, could)
        assert len(set(freed)) == len(freed)
        gone = set(freed)
        for _, slots in self.locks:
            assert not gone & set(slots), "a locked prefix was evicted"
        self.known = {key: slot for key, slot in self.known.items() if slot not in gone}
        self.free |= gone

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check_invariants()
        held = self.tree.held_slots().tolist()
        assert sorted(held) == sorted(self.known.values())
        assert self.tree.evictable_tokens + self.tree.locked_tokens == len(held)
        locked = {slot for _, slots in self.locks for slot in slots}
        assert self.tree.locked_tokens >= len(locked)


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = hypothesis_settings(max_examples=40, stateful_step_count=30, deadline=None)
