"""What a linear is given beside its activations and weight, and whether all of it fits together.

It knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cardan.errors import UnsupportedError

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What becomes of a sum.

    Attributes:
        bias: ``[out_features]`` or None.
        residual: ``[rows, out_features]`` or None.
        out: where it is written, ``[rows, out_features]``; None for a new tensor.
        out_dtype: type of a new tensor; None for that of the activations.
    """

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    out: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None

    @property
    def residual_stride(self) -> int:
        """From row to row of the residual; 0 where there is none."""
        return 0 if self.residual is None else self.residual.stride(0)


def check_linear(x: torch.Tensor, out_features: int, in_features: int, epilogue: Epilogue) -> torch.Tensor:
    """Make sure that shapes and types fit; returns the tensor to write to.

    Raises:
        UnsupportedError: they do not.
    """
    if x.dtype not in FLOATS:
        raise UnsupportedError(f"x must be {_listed()}, got {x.dtype}. Cast it first.")
    return check_epilogue(x, out_features, in_features, epilogue, epilogue.out_dtype or x.dtype)


def check_epilogue(
    x: torch.Tensor, out_features: int, in_features: int, epilogue: Epilogue, dtype: torch.dtype
) -> torch.Tensor:
    """The same for activations of any type.

    Raises:
        UnsupportedError: shapes or types do not fit.
    """
    if x.dim() != 2 or x.shape[1] != in_features or (x.shape[0] and x.stride(1) != 1):
        raise UnsupportedError(
            f"x must be [rows, {in_features}] with contiguous rows, got {list(x.shape)} with strides "
            f"{list(x.stride())}. Check the linear that the weight belongs to."
        )
    shape = (x.shape[0], out_features)
    bias, residual, out = epilogue.bias, epilogue.residual, epilogue.out
    if bias is not None and (tuple(bias.shape) != (out_features,) or bias.dtype not in FLOATS):
        raise UnsupportedError(f"bias must be {_listed()} [{out_features}], got {bias.dtype} {list(bias.shape)}.")
    for name, given in (("residual", residual), ("out", out)):
        if given is None:
            continue
        if tuple(given.shape) != shape or given.dtype not in FLOATS or (given.numel() and given.stride(1) != 1):
            raise UnsupportedError(
                f"{name} must be {_listed()} {list(shape)} with contiguous rows, got {given.dtype} "
                f"{list(given.shape)} with strides {list(given.stride())}."
            )
    return torch.empty(shape, dtype=dtype, device=x.device) if out is None else out


def _listed() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
