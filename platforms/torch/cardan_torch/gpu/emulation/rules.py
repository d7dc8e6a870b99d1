"""What host code must not do while a GPU works: anything that waits for it, seen as torch calls.

It knows no GPU: torch's CPU tensors stand for the device's. Two nets are cast, since neither sees everything: Python's
calls on tensors (``.item()``, ``bool(x)``), and the operations that these and others come down to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class RuleError(RuntimeError):
    """Host code did what a GPU does not allow here, or what would make it wait."""


WAITING_CALLS: Mapping[Any, str] = {
    torch.Tensor.item: ".item()",
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.cpu: ".cpu()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.nonzero: ".nonzero()",
    torch.Tensor.__bool__: "bool(tensor)",
    torch.Tensor.__int__: "int(tensor)",
    torch.Tensor.__float__: "float(tensor)",
    torch.Tensor.__index__: "a tensor as an index",
    torch.nonzero: "torch.nonzero",
    torch.tensor: "torch.tensor, a copy from pageable memory",
    torch.as_tensor: "torch.as_tensor, a copy from pageable memory",
}
"""Python's calls that wait, with what to call them."""

WAITING_OPERATIONS = frozenset(
    {
        "_local_scalar_dense",
        "_unique",
        "_unique2",
        "argwhere",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "nonzero_numpy",
        "unique_consecutive",
        "unique_dim",
    }
)
"""Operations whose results' sizes or values the host waits for."""

_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})

_lifted: ContextVar[bool] = ContextVar("lifted", default=False)


@contextmanager
def lifted() -> Iterator[None]:
    """The rules do not hold inside: for the stand-in's own copies and for the insides of interpreted kernels."""
    token = _lifted.set(True)
    try:
        yield
    finally:
        _lifted.reset(token)


@contextmanager
def no_waiting(where: str) -> Iterator[None]:
    """Raise on anything that waits for the device.

    Args:
        where: for messages, such as ``between launch and result``.

    Raises:
        RuleError: at the call that waits.
    """
    with _Calls(where), _Operations(where):
        yield


def check_operation(func: Any, args: Sequence[Any], where: str) -> None:
    """Refuse an operation that waits.

    Raises:
        RuleError: it does.
    """
    name = func.overloadpacket.__name__
    if name in WAITING_OPERATIONS or str(func) == "aten.repeat_interleave.Tensor":
        raise RuleError(_message(f"aten.{name}", where))
    if name in _INDEXING and any(_is_mask(index) for index in args[1]):
        raise RuleError(_message(f"aten.{name} by a mask of bools", where))


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _message(what: str, where: str) -> str:
    return f"{what} waits for the device {where}. Keep it on the device, or decide on the host from what it knows."


class _Calls(TorchFunctionMode):
    def __init__(self, where: str) -> None:
        self._where = where

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in WAITING_CALLS and not _lifted.get():
            raise RuleError(_message(WAITING_CALLS[func], self._where))
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where = where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if not _lifted.get():
            check_operation(func, args, self._where)
        return func(*args, **(kwargs or {}))
