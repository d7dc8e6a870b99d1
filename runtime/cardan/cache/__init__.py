"""The KV cache on the host: slots, rows, and the radix tree of shared prefixes.

It moves integers and knows neither requests nor devices.
"""

from cardan.cache.eviction import EVICTION_POLICIES, EvictionRank, eviction_policy
from cardan.cache.prefix_cache import NO_SLOTS, Insertion, Match, NodeHandle, NoPrefixCache, PrefixCache
from cardan.cache.radix_tree import RadixTree
from cardan.cache.rows import RowTable
from cardan.cache.slots import SlotAllocator

__all__ = [
    "EVICTION_POLICIES",
    "NO_SLOTS",
    "EvictionRank",
    "Insertion",
    "Match",
    "NoPrefixCache",
    "NodeHandle",
    "PrefixCache",
    "RadixTree",
    "RowTable",
    "SlotAllocator",
    "eviction_policy",
]
