"""How attention makes scores.

It knows no kernel and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cardan.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores are made of ``q @ k``.

    Attributes:
        scale: factor on them; above 0.
        window: a query at position ``p`` sees keys at positions ``> p - window``; None sees all.
        softcap: ``cap * tanh(score / cap)`` on scaled scores; None for none.
        sinks: ``[q_heads]`` of any float type: of each query head a score without a value, which takes its share of
            the softmax; None for none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("scale", "window", "softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UnsupportedError(f"{name} of attention must be above 0, got {value}. Pass a positive number.")
