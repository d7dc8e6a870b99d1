"""What the ranks of a tensor-parallel group tell each other; a platform supplies it over its own fabric.

It knows no model and no array library.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

from cardan.errors import ConfigError
from cardan.types import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One rank's place in a group.

    Attributes:
        rank: from 0.
        size: ranks of the group.
        address: ``host:port`` where rank 0 can be reached before the fabric is up.

    Raises:
        ConfigError: there is no such rank, or the address names no port.
    """

    rank: int
    size: int
    address: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"A rank of {self.size} must be 0 to {self.size - 1}, got {self.rank}. Count the ranks from 0."
            )
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(
                f"The address of rank 0 must be host:port, got {self.address!r}. Pass such as 127.0.0.1:29500."
            )


class Communicator(abc.ABC):
    """One rank's end of the group. All ranks call the same methods in the same order with arrays of one shape and type.

    Calls are enqueued where the device's other work is; none waits for the device.

    Attributes:
        place: of this rank.
    """

    place: RankPlace

    @abc.abstractmethod
    def all_reduce(self, x: Array) -> Array:
        """Sum over ranks, of ``x``'s shape and type; may change ``x`` in place."""

    @abc.abstractmethod
    def all_gather(self, x: Array) -> Array:
        """The last axis of all ranks' ``x: [..., features]``, joined in their order: ``[..., size * features]``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the group."""
