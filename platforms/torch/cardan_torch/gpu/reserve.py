"""Memory that steps share of which one runs at a time, such as all that are captured.

It knows no attention.
"""

from __future__ import annotations

import torch


class Reserve:
    """Flat memory of one element type that grows when more is asked for; what was given out stays where it is."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Make a reserve; it is empty until it is asked.

        Args:
            device: where the memory is.
            dtype: of its elements.
        """
        self._device = device
        self._dtype = dtype
        self._kept: list[torch.Tensor] = []

    def take(self, count: int) -> torch.Tensor:
        """``[count]``, without values of its own; whoever asks next is given the same memory."""
        found = next((kept for kept in self._kept if len(kept) >= count), None)
        if found is None:
            found = torch.empty(count, dtype=self._dtype, device=self._device)
            self._kept.append(found)
        return found[:count]
