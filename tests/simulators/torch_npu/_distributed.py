"""``hccl`` of the simulated torch_npu: the two collectives that are called, over gloo between processes here.

Sources: op-plugin, docs/context/c10d_npu-ProcessGroupHCCL.md; CANN 8.5, HCCL API, HcclAllReduce and HcclAllGather:
types of Atlas A2 and A3, one type and count for all ranks; torch_npu, csrc/distributed/ProcessGroupHCCL.cpp: where
tensors must be, and how they must lie. Other collectives and other reductions are refused.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import _create_work_from_future

from torch_npu import _tensor
from torch_npu._refusal import refuse, require, require_dtype

BACKEND = "hccl"
SUMMED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)
GATHERED = (*SUMMED, torch.uint8)


class ProcessGroupHCCL(distributed.ProcessGroup):
    """One rank's end of a group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        """Meet the other ranks."""
        super().__init__(rank, size)
        self._gloo = distributed.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        """As torch asks for it."""
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        """What torch asks whether groups can be split off this one: they cannot here."""
        require(device.type == "npu", BACKEND, f"it is for NPUs, got {device}")
        return SimpleNamespace(supports_splitting=False)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        """Sum in place (HcclAllReduce); 16-bit floats are summed in float32 and rounded once."""
        function = "HcclAllReduce"
        (tensor,) = tensors
        raw = _checked(tensor, SUMMED, function)
        if options is not None and options.reduceOp != distributed.ReduceOp.SUM:
            refuse(function, f"the simulator knows sums, got {options.reduceOp}")
        wide = raw.to(_tensor.WIDE.get(raw.dtype, raw.dtype), copy=True)
        self._gloo.allreduce([wide]).wait()
        raw.copy_(wide)
        return _done(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> Any:
        """All ranks' tensors (HcclAllGather)."""
        function = "HcclAllGather"
        (parts,), (mine,) = outputs, inputs
        raw = _checked(mine, GATHERED, function)
        require(len(parts) == self.size(), function, f"there must be {self.size()} outputs, got {len(parts)}")
        held = [_checked(part, (raw.dtype,), function) for part in parts]
        fitting = all(part.shape == raw.shape for part in held)
        require(fitting, function, "every output must have the shape of the input")
        moved = [torch.empty(raw.shape, dtype=raw.dtype).view(torch.uint8) for _ in held]
        self._gloo.allgather([moved], [raw.view(torch.uint8)]).wait()
        for part, came in zip(held, moved, strict=True):
            part.copy_(came.view(raw.dtype))
        return _done(outputs)


def _checked(tensor: torch.Tensor, allowed: tuple[torch.dtype, ...], function: str) -> torch.Tensor:
    """A tensor's values in host memory."""
    if not isinstance(tensor, _tensor.NpuTensor):
        refuse(function, f"Tensors must be NPU and dense, got {tensor.device.type}")
    require_dtype(tensor, allowed, function, "the tensor")
    require(tensor.is_contiguous(), function, "Tensors must be contiguous")
    require(_tensor.state.recording is None, function, "the simulator does not capture collectives")
    return tensor.raw


def _done(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroupHCCL:
    return ProcessGroupHCCL(store, rank, size, timeout)


def register() -> None:
    """Tell torch of the library, as importing torch_npu does."""
    if distributed.is_available() and BACKEND not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(BACKEND, _create, devices=["npu"])
