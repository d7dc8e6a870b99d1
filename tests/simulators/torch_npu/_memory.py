"""Which storages of the simulated NPU are alive, how many bytes they take, and how many they took at most.

It knows no tensor: storages come as addresses.
"""

from __future__ import annotations

import weakref

TOTAL = 4 * 2**30
"""Bytes of the simulated NPU."""


class Allocation:
    """One storage; it is given back when the last tensor over it is gone.

    Attributes:
        nbytes: its size.
        device_format: the format tag that it was cast to.
        verified_mask: whether its values were found to be the documented lower triangle.
    """

    __slots__ = ("__weakref__", "device_format", "nbytes", "verified_mask")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.device_format: int | None = None
        self.verified_mask = False
        counters.allocated += nbytes
        counters.peak = max(counters.peak, counters.allocated)

    def __del__(self) -> None:
        counters.allocated -= self.nbytes


class Counters:
    """What the allocator knows.

    Attributes:
        allocated: bytes of living storages.
        peak: most of them since the peak was reset.
    """

    def __init__(self) -> None:
        self.allocated = 0
        self.peak = 0


counters = Counters()
_living: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()


def allocation_of(address: int, nbytes: int) -> Allocation:
    """The allocation of a storage, which is made when it is first seen."""
    found = _living.get(address)
    if found is None or found.nbytes != nbytes:
        found = _living[address] = Allocation(nbytes)
    return found
