"""Root mean square normalization, alone or of a sum with the residual stream.

It knows no model.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis of ``x: [..., features]``, computed in float32.

    Args:
        x: two or three axes, of which the last is contiguous and the others may be strided.
        weight: ``[features]`` of any float type.
        eps: added to the mean of squares.
        out: contiguous, of the shape and type of ``x``, for the result.
    """


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``s = x + residual``, rounded to the type of ``x``; returns ``(rms_norm(s), s)``.

    Args:
        x: ``[..., features]`` as ``rms_norm`` takes it.
        residual: of the same shape and type.
        weight: ``[features]``.
        eps: added to the mean of squares.
        out: contiguous, for the norm.
        total: contiguous, for the sum; may be ``residual``.
    """
