"""Ranks through ``torch.distributed``, over whatever library torch has for a device.

It knows no model and no library by name; a process is one rank of one group.
"""

from __future__ import annotations

import torch
from torch import distributed

from cardan.errors import ConfigError
from cardan.platform import Communicator, RankPlace


class TorchCommunicator(Communicator):
    """A process's end of torch's default group."""

    def __init__(self, place: RankPlace, device: torch.device, library: str) -> None:
        """Join the group; returns when all ranks did.

        Args:
            place: of this rank.
            device: where its tensors are.
            library: torch's name of the library that ranks speak through.

        Raises:
            ConfigError: this process belongs to a group already, or torch was built without the library.
        """
        if not distributed.is_available() or not distributed.is_backend_available(library):
            raise ConfigError(f"Ranks on {device.type} need {library}, and torch was built without it. Run one rank.")
        if distributed.is_initialized():
            raise ConfigError("This process is a rank of a group already. Run each rank in a process of its own.")
        self.place = place
        distributed.init_process_group(
            library,
            init_method=f"tcp://{place.address}",
            rank=place.rank,
            world_size=place.size,
            device_id=None if device.type == "cpu" else device,
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Communicator.all_reduce``; changes ``x``."""
        distributed.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Communicator.all_gather``."""
        parts = [torch.empty_like(x) for _ in range(self.place.size)]
        distributed.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def close(self) -> None:
        """See ``Communicator.close``."""
        distributed.destroy_process_group()
