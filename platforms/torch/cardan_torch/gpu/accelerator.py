"""What a GPU offers beyond tensors: pinned copies, a stream of its own for results, captured graphs, its memory.

It knows no model and no attention. ``TorchAccelerator`` is the real one, by torch's API that NVIDIA's and AMD's GPUs
share; ``cardan_torch.gpu.emulation`` stands in for it where there is none.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from cardan.platform import Fetch, Memory
from cardan_torch.allocator import allocator_memory, allocator_peak

Run: TypeAlias = Callable[[], tuple[torch.Tensor, ...]]
"""Work that is to be captured; it returns what a replay overwrites."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipFacts:
    """What kernels and plans are chosen by.

    Attributes:
        name: what its maker calls it.
        arch: what kernels are compiled for, ``sm_90`` or ``gfx942``.
        units: multiprocessors or compute units, which a launch should fill.
        total_memory: in bytes.
        runtime: the vendor's runtime that torch was built for, ``CUDA 12.8`` or ``HIP 6.4``.
    """

    name: str
    arch: str
    units: int
    total_memory: int
    runtime: str


class CapturedWork(abc.ABC):
    """Work that was captured, over fixed addresses."""

    @abc.abstractmethod
    def replay(self) -> None:
        """Enqueue all of it again by one call."""


class Accelerator(abc.ABC):
    """One GPU, or what stands in for it.

    Attributes:
        device: torch's name of it.
        chip: what it is.
        compiles: whether a kernel's first call compiles it, so that work is run once before it is captured.
        collectives: torch's name of the library that ranks speak through.
    """

    device: torch.device
    chip: ChipFacts
    compiles: bool
    collectives: str

    @abc.abstractmethod
    def scope(self) -> AbstractContextManager[Any]:
        """Entered around all work: this device, its compute stream, no gradients."""

    @abc.abstractmethod
    def upload(self, array: np.ndarray[Any, Any], out: torch.Tensor | None = None) -> torch.Tensor:
        """Enqueue a copy of a host array, which may change at once; into ``out`` where it is given."""

    @abc.abstractmethod
    def download(self, tensors: Sequence[torch.Tensor]) -> Fetch:
        """Enqueue copies to the host on the stream for results; what is computed later does not change them."""

    @abc.abstractmethod
    def capture(self, run: Run) -> tuple[CapturedWork, tuple[torch.Tensor, ...]]:
        """Record what ``run`` enqueues, without relying on its values; memory is shared with what was captured before.

        The tensors that come back hold results after a replay only.
        """

    @abc.abstractmethod
    def memory(self) -> Memory:
        """Memory as it is now."""

    @abc.abstractmethod
    def peak(self, run: Callable[[], None]) -> int | None:
        """Most bytes that ``run`` held at once beyond what was held before; None, without a run, where none counts."""

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for what is under way and give memory back."""


class TorchAccelerator(Accelerator):
    """A GPU through ``torch.cuda``, which is also the name of AMD's in torch."""

    compiles = True
    collectives = "nccl"
    """Also the name of AMD's, RCCL, in torch."""

    def __init__(self, index: int) -> None:
        """Open a GPU, and make its stream the thread's own; nothing runs on the default stream from then on."""
        self.device = torch.device("cuda", index)
        self.chip = read_chip(index)
        torch.cuda.set_device(self.device)
        self._compute, self._results = (_stream(self.device) for _ in range(2))
        self._pool: Any = None
        torch.cuda.set_stream(self._compute)

    def scope(self) -> AbstractContextManager[Any]:
        """See ``Accelerator.scope``."""
        return self._scoped()

    @contextmanager
    def _scoped(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.device(self.device), torch.cuda.stream(self._compute):
            yield

    def upload(self, array: np.ndarray[Any, Any], out: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Accelerator.upload``; torch keeps the pinned buffer until the copy is done."""
        pinned = torch.from_numpy(np.require(array, requirements=("C", "W"))).pin_memory()
        if out is None:
            return pinned.to(self.device, non_blocking=True)
        return out.copy_(pinned, non_blocking=True)

    def download(self, tensors: Sequence[torch.Tensor]) -> Fetch:
        """See ``Accelerator.download``."""
        return _Download(tensors, self._results)

    def capture(self, run: Run) -> tuple[CapturedWork, tuple[torch.Tensor, ...]]:
        """See ``Accelerator.capture``."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._compute, capture_error_mode="thread_local"):
            results = run()
        self._pool = graph.pool() if self._pool is None else self._pool
        return _TorchGraph(graph), results

    def memory(self) -> Memory:
        """What the driver says, and what torch holds but does not use."""
        return allocator_memory(torch.cuda, self.device)

    def peak(self, run: Callable[[], None]) -> int:
        """See ``Accelerator.peak``, by torch's allocator."""
        return allocator_peak(torch.cuda, self.device, run)

    def close(self) -> None:
        """See ``Accelerator.close``; the thread goes back to the default stream."""
        torch.cuda.synchronize(self.device)
        torch.cuda.set_stream(torch.cuda.default_stream(self.device))
        self._pool = None
        torch.cuda.empty_cache()


class _TorchGraph(CapturedWork):
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class _Download:
    """Copies that run on a stream of their own, behind what was enqueued before them on the compute stream."""

    def __init__(self, tensors: Sequence[torch.Tensor], results: torch.cuda.Stream) -> None:
        staged = [staging_copy(x) for x in tensors]
        ready, self._done = (_event() for _ in range(2))
        ready.record()
        results.wait_event(ready)
        self._copies = []
        with torch.cuda.stream(results):
            for x in staged:
                copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
                copy.copy_(x, non_blocking=True)
                x.record_stream(results)
                self._copies.append(copy)
            self._done.record(results)

    def wait(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Block until the copies are done."""
        self._done.synchronize()
        return tuple(copy.numpy() for copy in self._copies)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def staging_copy(x: torch.Tensor) -> torch.Tensor:
    """A copy on the device that no replay overwrites, in a type that numpy has."""
    return x.float() if x.dtype is torch.bfloat16 else x.clone(memory_format=torch.contiguous_format)


def read_chip(index: int) -> ChipFacts:
    """What torch says of a GPU; it is asked without starting work on it."""
    found = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        arch = str(found.gcnArchName).partition(":")[0]
        runtime = f"HIP {torch.version.hip}"
    else:
        arch = f"sm_{found.major}{found.minor}"
        runtime = f"CUDA {torch.version.cuda}"
    return ChipFacts(
        name=found.name, arch=arch, units=found.multi_processor_count, total_memory=found.total_memory, runtime=runtime
    )
