"""One node of the radix tree.

It knows its neighbours and its counts, and leaves every decision to the tree.
"""

from __future__ import annotations

from cardan.types import Int32Array


class Node:
    """A run of tokens, their slots, and what eviction policies look at.

    Attributes:
        tokens: int32 ``[n]``, whole pages; empty for the root of a namespace.
        slots: int32 ``[n]``.
        parent: the node before it; None for a root and for a node that was evicted.
        children: by the first page of their tokens.
        namespace: whose root this hangs under.
        end: tokens from the root to the end of this node.
        reach: ``end`` of the longest sequence that went through here, evicted parts included.
        locks: users of this node and of what is below it.
        last_access: tick of the last use.
        created: tick of the insertion.
        hits: requests that were admitted with it.
        priority: highest priority of a request that brought or used it.
        doubted: a request that failed had computed it, and others still used it then.
    """

    __slots__ = (
        "children",
        "created",
        "doubted",
        "end",
        "hits",
        "last_access",
        "locks",
        "namespace",
        "parent",
        "priority",
        "reach",
        "slots",
        "tokens",
    )

    def __init__(self, tokens: Int32Array, slots: Int32Array, parent: Node | None, namespace: str | None) -> None:
        self.tokens = tokens
        self.slots = slots
        self.parent = parent
        self.children: dict[int | bytes, Node] = {}
        self.namespace = namespace
        self.end: int = (parent.end if parent else 0) + int(tokens.shape[0])
        self.reach: int = self.end
        self.locks = 0
        self.last_access = 0
        self.created = 0
        self.hits = 0
        self.priority = 0
        self.doubted = False

    @property
    def start(self) -> int:
        """Tokens from the root to the beginning of this node."""
        return self.end - int(self.tokens.shape[0])
