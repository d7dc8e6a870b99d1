"""A radix tree over token ids: finds, keeps and drops the KV of shared prefixes.

It does not know requests or the pool; it is told of use by locks and gives evicted slots to its caller.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from cardan.cache.eviction import EvictionRank, Rank, eviction_policy
from cardan.cache.node import Node
from cardan.cache.prefix_cache import NO_SLOTS, Insertion, Match, NodeHandle, PrefixCache
from cardan.types import Int32Array


class RadixTree(PrefixCache):
    """Prefixes of all namespaces (LoRA adapter, cache salt), one root each.

    Nodes hold whole pages. A node is locked while any sequence through it runs, so locks grow towards the root.
    Unlocked leaves wait in a heap by the policy's rank; an entry whose rank is out of date is skipped, because a
    newer one was pushed when the rank changed.

    Source: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", 2024, section 3.
    """

    def __init__(self, page_size: int, policy: str | EvictionRank = "lru") -> None:
        """Make an empty tree.

        Args:
            page_size: tokens per page.
            policy: name of an eviction policy, or a function that ranks nodes (the lowest goes first).

        Raises:
            ConfigError: there is no policy of that name.
        """
        self._page_size = page_size
        self._rank = eviction_policy(policy) if isinstance(policy, str) else policy
        self._roots: dict[str | None, Node] = {}
        self._heap: list[tuple[Rank, int, Node]] = []
        self._tick = 0
        self._pushes = 0
        self._num_nodes = 0
        self._evictable = 0
        self._locked = 0

    @property
    def evictable_tokens(self) -> int:
        """Cached tokens that no one uses."""
        return self._evictable

    @property
    def locked_tokens(self) -> int:
        """Cached tokens that someone uses."""
        return self._locked

    # --- finding ---

    def match(self, tokens: Int32Array, namespace: str | None, limit: int) -> Match:
        """Find the longest cached prefix; splits a node in which it ends, and touches all nodes on the way."""
        self._tick += 1
        tokens = tokens[: self._whole_pages(min(limit, tokens.shape[0]))]
        node = self._roots.get(namespace)
        if node is None:
            return Match(NO_SLOTS, None)
        pieces: list[Int32Array] = []
        position = 0
        while (child := self._child(node, tokens, position)) is not None:
            common = self._common(child, tokens, position)
            if common < child.tokens.shape[0]:
                child = self._split(child, common)
            pieces.append(child.slots)
            position += common
            self._touch(child)
            node = child
        return Match(_concatenate(pieces), node)

    def note_hit(self, node: NodeHandle) -> None:
        """Count a hit on every node from ``node`` to the root."""
        while node is not None:
            node.hits += 1
            self._offer(node)
            node = node.parent

    def peek(self, tokens: Int32Array, namespace: str | None, limit: int) -> tuple[int, NodeHandle]:
        """Length of the match and the node it ends in, changing nothing."""
        tokens = tokens[: self._whole_pages(min(limit, tokens.shape[0]))]
        node = self._roots.get(namespace)
        if node is None:
            return 0, None
        position = 0
        while (child := self._child(node, tokens, position)) is not None:
            common = self._common(child, tokens, position)
            position += common
            node = child
            if common < child.tokens.shape[0]:
                break
        return position, node

    # --- keeping ---

    def insert(self, tokens: Int32Array, slots: Int32Array, namespace: str | None, priority: int = 0) -> Insertion:
        """Keep the whole pages of a sequence; what is already here is not taken a second time."""
        self._tick += 1
        kept = self._whole_pages(tokens.shape[0])
        tokens, slots = tokens[:kept], slots[:kept]
        node, pieces = self._root(namespace), []
        position = 0
        while (child := self._child(node, tokens, position)) is not None:
            common = self._common(child, tokens, position)
            if common < child.tokens.shape[0]:
                child = self._split(child, common)
            pieces.append(child.slots)
            position += common
            child.priority = max(child.priority, priority)
            self._touch(child)
            node = child
        if position < kept:
            node = self._add_leaf(node, tokens[position:].copy(), slots[position:].copy(), priority)
        return Insertion(kept, _concatenate(pieces), node)

    def lock(self, node: NodeHandle) -> None:
        """Keep everything from the root to ``node``."""
        while node is not None:
            if node.locks == 0:
                size = node.tokens.shape[0]
                self._evictable -= size
                self._locked += size
            node.locks += 1
            node = node.parent

    def unlock(self, node: NodeHandle) -> None:
        """Take one lock back from ``node`` up to the root."""
        while node is not None:
            assert node.locks > 0, "a prefix was unlocked more often than locked"
            node.locks -= 1
            if node.locks == 0:
                size = node.tokens.shape[0]
                self._evictable += size
                self._locked -= size
                self._offer(node)
            if node.parent is None:
                self._drop_empty_root(node)
            node = node.parent

    def evict(self, num_tokens: int) -> Int32Array:
        """Drop unlocked leaves, the lowest rank first, and their parents as those become leaves."""
        freed: list[Int32Array] = []
        count = 0
        while count < num_tokens and self._heap:
            rank, _, node = heapq.heappop(self._heap)
            if not self._can_go(node) or rank != self._rank(node):
                continue
            freed.append(node.slots)
            count += node.slots.shape[0]
            self._remove(node)
        return _concatenate(freed)

    def discard(self, tokens: Int32Array, namespace: str | None, keep: int) -> Int32Array:
        """Drop unlocked leaves of the path from its end towards the root, and doubt what cannot go."""
        freed: list[Int32Array] = []
        _, node = self.peek(tokens, namespace, tokens.shape[0])
        while node is not None and (parent := node.parent) is not None and (node.start >= keep or node.doubted):
            if self._can_go(node):
                freed.append(node.slots)
                self._remove(node)
            else:
                node.doubted = True
            node = parent
        return _concatenate(freed)

    # --- checks ---

    def held_slots(self) -> Int32Array:
        """Every slot in the tree."""
        return _concatenate([node.slots for node in self._walk()])

    def check_invariants(self) -> None:
        """Check links, keys, locks and counts."""
        evictable = locked = count = 0
        offered = {id(node) for rank, _, node in self._heap if rank == self._rank(node)}
        for node in self._walk():
            size = node.tokens.shape[0]
            count += 1
            assert size == node.slots.shape[0], "a node must have one slot for each token"
            assert size > 0, "only roots are empty"
            assert size % self._page_size == 0, "nodes hold whole pages"
            assert node.parent is not None, "a node in the tree has a parent"
            assert node.parent.children[self._key(node.tokens, 0)] is node, "a child is found by its first page"
            assert node.locks >= sum(child.locks for child in node.children.values()), "locks grow to the root"
            assert node.end == node.parent.end + size, "ends add up"
            if node.locks == 0 and not node.children:
                assert id(node) in offered, "every unlocked leaf can be evicted"
            evictable += size * (node.locks == 0)
            locked += size * (node.locks > 0)
        assert (evictable, locked, count) == (self._evictable, self._locked, self._num_nodes), "counts are kept"

    # --- inside ---

    def _walk(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _root(self, namespace: str | None) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(NO_SLOTS, NO_SLOTS, None, namespace)
        return root

    def _whole_pages(self, num_tokens: int) -> int:
        return max(num_tokens, 0) // self._page_size * self._page_size

    def _key(self, tokens: Int32Array, position: int) -> int | bytes:
        if self._page_size == 1:
            return int(tokens[position])
        return tokens[position : position + self._page_size].tobytes()

    def _child(self, node: Node, tokens: Int32Array, position: int) -> Node | None:
        if position >= tokens.shape[0]:
            return None
        return node.children.get(self._key(tokens, position))

    def _common(self, node: Node, tokens: Int32Array, position: int) -> int:
        """Tokens of ``node`` that go on at ``position`` of ``tokens``, whole pages."""
        ahead = tokens[position : position + node.tokens.shape[0]]
        same = node.tokens[: ahead.shape[0]] == ahead
        first_wrong = int(same.argmin())
        length = int(ahead.shape[0]) if same[first_wrong] else first_wrong
        return self._whole_pages(length)

    def _touch(self, node: Node) -> None:
        node.last_access = self._tick
        self._offer(node)

    def _split(self, node: Node, length: int) -> Node:
        """Cut a node in two and return the upper one; ``node`` stays the lower, since others may hold it."""
        parent = node.parent
        assert parent is not None, "roots are empty and never split"
        upper = Node(node.tokens[:length], node.slots[:length], parent, node.namespace)
        upper.reach, upper.locks, upper.hits, upper.doubted = node.reach, node.locks, node.hits, node.doubted
        upper.last_access, upper.created, upper.priority = node.last_access, node.created, node.priority
        parent.children[self._key(upper.tokens, 0)] = upper
        node.parent, node.tokens, node.slots = upper, node.tokens[length:], node.slots[length:]
        upper.children[self._key(node.tokens, 0)] = node
        self._num_nodes += 1
        self._offer(node)
        return upper

    def _add_leaf(self, parent: Node, tokens: Int32Array, slots: Int32Array, priority: int) -> Node:
        leaf = Node(tokens, slots, parent, parent.namespace)
        leaf.created, leaf.priority = self._tick, priority
        parent.children[self._key(tokens, 0)] = leaf
        self._num_nodes += 1
        self._evictable += tokens.shape[0]
        self._touch(leaf)
        return leaf

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "roots are never evicted"
        del parent.children[self._key(node.tokens, 0)]
        node.parent = None
        parent.reach = node.reach
        self._num_nodes -= 1
        self._evictable -= node.tokens.shape[0]
        if parent.parent is not None:
            self._offer(parent)
        else:
            self._drop_empty_root(parent)

    def _drop_empty_root(self, root: Node) -> None:
        if not root.children and root.locks == 0 and self._roots.get(root.namespace) is root:
            del self._roots[root.namespace]

    @staticmethod
    def _can_go(node: Node) -> bool:
        return node.locks == 0 and not node.children and node.parent is not None

    def _offer(self, node: Node) -> None:
        """Put a node into the heap if it can go."""
        if not self._can_go(node):
            return
        self._pushes += 1
        heapq.heappush(self._heap, (self._rank(node), self._pushes, node))
        if len(self._heap) > 64 + 4 * self._num_nodes:
            leaves = [leaf for leaf in self._walk() if self._can_go(leaf)]
            self._heap = [(self._rank(leaf), i, leaf) for i, leaf in enumerate(leaves)]
            self._pushes = len(leaves)
            heapq.heapify(self._heap)


def _concatenate(pieces: list[Int32Array]) -> Int32Array:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else NO_SLOTS
