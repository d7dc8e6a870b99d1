"""Records what is enqueued as a list of calls over fixed addresses, and runs it again: a GPU's graph, in Python.

It knows no model. As on a GPU, memory that the work takes belongs to the recording, memory from outside is only
pointed at: whoever gives it back, or moves it, breaks the replay. Here that raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from cardan_torch.gpu.accelerator import CapturedWork, Run
from cardan_torch.gpu.emulation.rules import RuleError, check_operation, lifted, no_waiting

Call: TypeAlias = Callable[[], None]

DURING = "while work is captured"

_current: ContextVar[Recording | None] = ContextVar("current", default=None)


@dataclass(frozen=True, slots=True)
class _Outside:
    """A tensor over memory that the recording does not own.

    Attributes:
        storage: without keeping it alive.
        address: where it was.
        like: type, shape, strides and offset, as an empty tensor of the meta device would say them.
    """

    storage: StorageWeakRef
    address: int
    dtype: torch.dtype
    like: tuple[tuple[int, ...], tuple[int, ...], int]

    @classmethod
    def of(cls, x: torch.Tensor) -> _Outside:
        storage = x.untyped_storage()
        like = (tuple(x.shape), tuple(x.stride()), int(x.storage_offset()))
        held = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return cls(held, storage.data_ptr(), x.dtype, like)

    def tensor(self) -> torch.Tensor:
        """The tensor, where it was.

        Raises:
            RuleError: its memory was given back or has moved.
        """
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)  # noqa: SLF001 - torch names it so
        if storage is None:
            raise RuleError(
                f"A captured step reads memory that was given back: {list(self.like[0])} {self.dtype}. "
                "Keep what a graph reads alive as long as the graph."
            )
        if storage.data_ptr() != self.address:
            raise RuleError(f"A captured step reads memory that has moved: {list(self.like[0])} {self.dtype}.")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.like[2], self.like[0], self.like[1])


class Recording(TorchDispatchMode, CapturedWork):  # type: ignore[no-untyped-call]
    """Calls in the order in which they were made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[Call] = []
        self._owned: dict[int, torch.UntypedStorage] = {}

    def record(self, run: Run) -> tuple[torch.Tensor, ...]:
        """Run once, and keep every call."""
        token = _current.set(self)
        try:
            with no_waiting(DURING), self, _kernels_to(self):
                results = run()
        finally:
            _current.reset(token)
        for x in results:
            if x.untyped_storage().data_ptr() not in self._owned:
                raise RuleError("A captured step returns memory that it does not write. Return what it computes.")
        return results

    def replay(self) -> None:
        """Every call again."""
        with _disable_current_modes(), lifted():
            for call in self._calls:
                call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run an operation and keep it."""
        kwargs = kwargs or {}
        check_operation(func, args, DURING)
        with lifted():
            results = func(*args, **kwargs)
        held_args, held_kwargs = self.hold(args), self.hold(kwargs)
        changes = func._schema.is_mutable  # noqa: SLF001 - torch names it so
        outputs = [x for x in (results if isinstance(results, list | tuple) else (results,)) if _is_tensor(x)]
        if not changes and outputs and all(self._is_view(x, (args, kwargs)) for x in outputs):
            return results
        for x in outputs:
            self.own(x)
        if "empty" in func.overloadpacket.__name__:
            return results

        outputs = [_as_it_is(x) for x in outputs]

        def call() -> None:
            again = func(*give(held_args), **give(held_kwargs))
            if not changes:
                listed = again if isinstance(again, list | tuple) else (again,)
                for x, y in zip(outputs, [y for y in listed if _is_tensor(y)], strict=True):
                    x.copy_(y)

        self._calls.append(call)
        return results

    def add(self, call: Call) -> None:
        """Keep a call that is not torch's."""
        self._calls.append(call)

    def own(self, x: torch.Tensor) -> None:
        """Take the memory of a tensor that was made while recording."""
        storage = x.untyped_storage()
        self._owned.setdefault(storage.data_ptr(), storage)

    def hold(self, tree: Any) -> Any:
        """Arguments with tensors over memory from outside replaced by what points at them."""

        def one(x: torch.Tensor) -> Any:
            owned = x.untyped_storage().data_ptr() in self._owned or x.numel() == 0
            return _as_it_is(x) if owned else _Outside.of(x)

        return tree_map_only(torch.Tensor, one, tree)

    @staticmethod
    def _is_view(x: torch.Tensor, inputs: Any) -> bool:
        address = x.untyped_storage().data_ptr()
        found: list[bool] = []
        tree_map_only(torch.Tensor, lambda y: found.append(y.untyped_storage().data_ptr() == address), inputs)
        return any(found) and address != 0


def launch(run: Call) -> None:
    """Run what stands for a kernel of a library: no rule looks inside, and a capture keeps it as one call.

    Args:
        run: writes to memory that was taken outside of it.
    """
    recording = _current.get()
    if recording is None:
        with lifted():
            run()
        return
    with _disable_current_modes(), lifted():
        run()
    recording.add(run)


def give(tree: Any) -> Any:
    """Arguments of a call, as they are now.

    Raises:
        RuleError: memory that they point at was given back.
    """
    return tree_map_only(_Outside, _Outside.tensor, tree)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    """The same memory under shape and strides of its own, which operations in place may change later."""
    return torch.ops.aten.alias.default(x)  # type: ignore[no-any-return]


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


@contextmanager
def _kernels_to(recording: Recording) -> Iterator[None]:
    """Launches of interpreted kernels are kept as calls, whose insides no rule looks at."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def keep(executor: Any, *args: Any, **kwargs: Any) -> None:
        held = recording.hold((args, kwargs))

        def call() -> None:
            again, named = give(held)
            launch(executor, *again, **named)

        with _disable_current_modes(), lifted():
            call()
        recording.add(call)

    GridExecutor.__call__ = keep
    try:
        yield
    finally:
        GridExecutor.__call__ = launch
