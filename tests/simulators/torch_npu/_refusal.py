"""How the simulator refuses: by the error that torch_npu raises, with what was got and what the documentation says.

It knows no operation.
"""

from __future__ import annotations

from typing import NoReturn

import torch

NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int8: "int8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.qint8: "qint8",
}


def refuse(function: str, what: str) -> NoReturn:
    """Refuse a call.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(f"{function}: {what}")


def require(condition: bool, function: str, what: str) -> None:
    """Refuse a call unless a condition holds.

    Raises:
        RuntimeError: it does not.
    """
    if not condition:
        refuse(function, what)


def require_dtype(tensor: torch.Tensor, allowed: tuple[torch.dtype, ...], function: str, name: str) -> None:
    """Refuse a tensor of a type that is not documented.

    Raises:
        RuntimeError: its type is not among those allowed.
    """
    if tensor.dtype not in allowed:
        listed = ", ".join(NAMES.get(dtype, str(dtype)) for dtype in allowed)
        refuse(function, f"{name} must be {listed}, got {NAMES.get(tensor.dtype, tensor.dtype)}")
