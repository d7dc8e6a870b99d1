from __future__ import annotations

import numpy as np
import pytest

from cardan.cache import RadixTree, eviction_policy
from cardan.cache.eviction import TLRU_TOKENS
from cardan.errors import ConfigError
from cardan.types import Int32Array


def sequence(first: int, count: int = 2) -> Int32Array:
    return np.asarray([first] + [1] * (count - 1), dtype=np.int32)


def slots(first: int, count: int = 2) -> Int32Array:
    return np.arange(first, first + count, dtype=np.int32)


def order_of_eviction(tree: RadixTree) -> list[int]:
    """First slot of each leaf, in the order in which they go."""
    gone = []
    while tree.evictable_tokens:
        gone.append(int(tree.evict(1)[0]))
    return gone


def three(policy: str) -> RadixTree:
    """Leaves 10, 20, 30, inserted in this order."""
    tree = RadixTree(1, policy)
    for first in (10, 20, 30):
        tree.insert(sequence(first), slots(first), None)
    return tree


def use(tree: RadixTree, first: int) -> None:
    tree.note_hit(tree.match(sequence(first), None, 2).node)


def test_lru_drops_what_was_used_longest_ago() -> None:
    tree = three("lru")
    use(tree, 10)
    assert order_of_eviction(tree) == [20, 30, 10]


def test_mru_drops_what_was_used_last() -> None:
    tree = three("mru")
    use(tree, 10)
    assert order_of_eviction(tree) == [10, 30, 20]


def test_lfu_drops_what_was_used_least() -> None:
    tree = three("lfu")
    for first in (10, 10, 20, 30, 30):
        use(tree, first)
    assert order_of_eviction(tree) == [20, 10, 30]


def test_fifo_drops_what_came_first_whatever_was_used() -> None:
    tree = three("fifo")
    use(tree, 10)
    assert order_of_eviction(tree) == [10, 20, 30]


def test_slru_protects_what_was_used_twice() -> None:
    tree = three("slru")
    for first in (10, 10, 20, 30):
        use(tree, first)
    assert order_of_eviction(tree) == [20, 30, 10]


def test_priority_drops_the_lowest_first() -> None:
    tree = RadixTree(1, "priority")
    for first, priority in ((10, 5), (20, 1), (30, 9)):
        tree.insert(sequence(first), slots(first), None, priority)
    assert order_of_eviction(tree) == [20, 10, 30]


def test_tlru_drops_first_what_is_cheap_to_compute_again() -> None:
    tree = RadixTree(1, "tlru")
    long = TLRU_TOKENS + 1
    tree.insert(sequence(10, long), slots(10, long), None)
    tree.insert(sequence(5), slots(5000), None)
    use(tree, 5)
    assert order_of_eviction(tree) == [5000, 10]


def test_tlru_counts_evicted_tails_to_the_cost_of_what_is_left() -> None:
    tree = RadixTree(1, "tlru")
    stem = np.ones(10, dtype=np.int32)
    long = np.concatenate((stem, np.full(TLRU_TOKENS, 2, dtype=np.int32)))
    tree.insert(stem, slots(10, 10), None)
    tree.insert(long, slots(10, len(long)), None)
    tree.insert(sequence(7), slots(9000), None)
    assert tree.evict(1).shape == (TLRU_TOKENS,), "the tail alone is cheap"
    assert order_of_eviction(tree) == [9000, 10], "losing the stem as well is not"


def test_a_policy_of_ones_own_is_a_function() -> None:
    tree = RadixTree(1, lambda node: (-int(node.slots[0]),))
    for first in (10, 20, 30):
        tree.insert(sequence(first), slots(first), None)
    assert order_of_eviction(tree) == [30, 20, 10]


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--radix-eviction-policy must be one of lru, lfu, .*, got 'best'"):
        eviction_policy("best")


@pytest.mark.parametrize("policy", ["lfu", "slru"])
def test_looking_up_is_no_hit(policy: str) -> None:
    tree = three(policy)
    for first in (20, 20, 30, 30):
        use(tree, first)
    for _ in range(5):
        tree.match(sequence(10), None, 2)
    assert order_of_eviction(tree) == [10, 20, 30]


def test_a_hit_counts_for_the_whole_prefix_and_not_for_what_follows() -> None:
    tree = RadixTree(1, "lfu")
    tree.insert(sequence(10, 4), slots(10, 4), None)
    half = tree.match(sequence(10, 3), None, 2)
    tree.note_hit(half.node)
    assert {node.end: node.hits for node in tree._walk()} == {2: 1, 4: 0}
