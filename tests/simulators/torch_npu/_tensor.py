"""Tensors of the simulated NPU: torch's own device type for foreign backends, with values in host memory.

It knows no operation of torch_npu; what torch itself computes on tensors goes through ``dispatch``, as do they.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_npu._memory import allocation_of
from torch_npu._refusal import refuse

ATEN = torch.ops.aten
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

PRODUCTS = frozenset({ATEN.mm.default, ATEN.bmm.default, ATEN.addmm.default, ATEN.baddbmm.default})
"""Computed in float32 and rounded once, as the cube unit accumulates."""

TO_HOST = frozenset({ATEN._local_scalar_dense.default, ATEN.equal.default, ATEN.is_nonzero.default})
SHAPED_BY_DATA = frozenset(
    {
        ATEN.nonzero.default,
        ATEN.masked_select.default,
        ATEN._unique2.default,
        ATEN.unique_dim.default,
        ATEN.repeat_interleave.Tensor,
    }
)
"""Their results have as many elements as the values say, so the host must wait for them."""


class NpuTensor(torch.Tensor):
    """A tensor on the simulated NPU.

    Attributes:
        raw: its values, in host memory.
        allocation: its storage, shared with all views of it.
    """

    raw: torch.Tensor
    allocation: Any
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> NpuTensor:
        """Wrap values."""
        return torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=DEVICE
        )

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw
        storage = raw.untyped_storage()
        self.allocation = allocation_of(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else None

    def __repr__(self, **_: Any) -> str:
        """Values, and where they are."""
        return f"npu({self.raw!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """What torch computes on such tensors."""
        return dispatch(func, args, kwargs or {})


DEVICE = "npu:0"


class Recording:
    """What a capture does with calls; ``torch_npu._graph`` puts one in ``state``."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        """Record a call and say what comes of it; arguments are of host memory."""
        raise NotImplementedError


class State:
    """Attributes:
    recording: the capture under way, or None.
    """

    recording: Recording | None = None


state = State()


def raw_of(value: Any) -> Any:
    """An argument with values of host memory in the place of the NPU's tensors."""
    if isinstance(value, NpuTensor):
        return value.raw
    if isinstance(value, list | tuple):
        return type(value)([raw_of(item) for item in value]) if value else value
    return value


def on_npu(value: Any) -> Any:
    """A result as a tensor of the NPU, or results as several."""
    if isinstance(value, torch.Tensor):
        return NpuTensor(value)
    if isinstance(value, tuple | list):
        return type(value)([on_npu(item) for item in value])
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def _check_devices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """All tensors must be on the NPU, but for numbers: tensors of no dimension."""
    # most arguments are tensors of the NPU or plain numbers
    others = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor | list | tuple)]
    for tensor in _tensors([value for value in others if type(value) is not NpuTensor]):
        if not isinstance(tensor, NpuTensor) and tensor.dim() > 0:
            refuse(
                str(func),
                "Expected all tensors to be on the same device, but found at least two devices, npu:0 and cpu!",
            )


def _check_result(func: Any, out: Any) -> None:
    for tensor in _tensors(out):
        if tensor.dtype in (torch.float64, torch.complex128):
            refuse(str(func), f"the NPU does not compute in {tensor.dtype}; cast to float32")


def _check_capture(func: Any) -> None:
    if state.recording is None:
        return
    if func in TO_HOST:
        refuse(str(func), "the host cannot wait for a value of a stream that is being captured (107027)")
    if func in SHAPED_BY_DATA:
        refuse(str(func), "the shape of the result depends on values, which the host cannot wait for while capturing")


def _indexes_by_mask(func: Any, args: tuple[Any, ...]) -> bool:
    if func not in (ATEN.index.Tensor, ATEN.index_put_.default, ATEN.index_put.default):
        return False
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


_composite: dict[Any, bool] = {}


def _is_composite(func: Any) -> bool:
    """Whether torch makes a call of others; in inference mode it comes as it was written."""
    found = _composite.get(func)
    if found is None:
        name = func.name()
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        found = _composite[func] = has(name, "CompositeImplicitAutograd")
    return found


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a call of torch on the NPU's tensors, or record it."""
    if _is_composite(func):
        return func.decompose(*args, **kwargs)
    if func is ATEN._to_copy.default:
        return _to_copy(args[0], kwargs)
    if func is ATEN.copy_.default:
        return _copy(*args, **kwargs)
    _check_devices(func, args, kwargs)
    _check_capture(func)
    if state.recording is not None and _indexes_by_mask(func, args):
        refuse(str(func), "an index of truth values has a shape that the host must wait for, while capturing")
    raw_args = tuple(raw_of(value) for value in args)
    raw_kwargs = {name: raw_of(value) for name, value in kwargs.items()}
    if "device" in raw_kwargs:
        raw_kwargs["device"] = "cpu"
    raw_kwargs.pop("pin_memory", None)
    run = _product if func in PRODUCTS else _plain
    if state.recording is not None:
        out = state.recording.call(func, raw_args, raw_kwargs, run)
    else:
        out = run(func, raw_args, raw_kwargs)
    if func._schema.is_mutable:
        return kwargs["out"] if "out" in kwargs else args[0]
    _check_result(func, out)
    return _as_first(args, out)


def _as_first(args: tuple[Any, ...], out: Any) -> Any:
    """A result that torch keeps for inference only where its first argument is: a view must be as what it views."""
    first = args[0] if args else None
    if torch.is_inference_mode_enabled() and isinstance(first, torch.Tensor) and not first.is_inference():
        with torch.inference_mode(False):
            return on_npu(out)
    return on_npu(out)


def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation of torch_npu, ``func`` over tensors of host memory, or record it."""
    _check_devices(func.__name__, args, kwargs)
    raw_args = tuple(raw_of(value) for value in args)
    raw_kwargs = {name: raw_of(value) for name, value in kwargs.items()}
    if state.recording is None:
        return on_npu(_plain(func, raw_args, raw_kwargs))
    return on_npu(state.recording.call(func, raw_args, raw_kwargs, _plain))


def _plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = args[0].dtype
    if dtype not in WIDE:
        return func(*args, **kwargs)
    wide = tuple(value.float() if isinstance(value, torch.Tensor) else value for value in args)
    return func(*wide, **kwargs).to(dtype)


def _to_copy(source: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    target = torch.device(source.device if device is None else device)
    options = {name: kwargs[name] for name in ("dtype", "memory_format") if kwargs.get(name) is not None}
    if target.type == "cpu" or not isinstance(source, NpuTensor):
        if state.recording is not None:
            refuse(
                "_to_copy", "memory of the host cannot be copied from or to while capturing; copy_() before a replay"
            )
        moved = ATEN._to_copy.default(raw_of(source), **options)
        if target.type == "cpu":
            return moved
        _check_result(ATEN._to_copy.default, moved)
        return NpuTensor(moved)
    args = (source.raw,)
    if state.recording is not None:
        out = state.recording.call(ATEN._to_copy.default, args, options, _plain)
    else:
        out = ATEN._to_copy.default(*args, **options)
    _check_result(ATEN._to_copy.default, out)
    return NpuTensor(out)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    crosses = not isinstance(target, NpuTensor) or (not isinstance(source, NpuTensor) and source.dim() > 0)
    if state.recording is None:
        raw_of(target).copy_(raw_of(source))
        return target
    if crosses:
        refuse("copy_", "memory of the host cannot be copied from or to while capturing; copy_() before a replay")
    state.recording.call(ATEN.copy_.default, (raw_of(target), raw_of(source)), {}, _plain)
    return target
