"""What this machine could do at best: reading memory, multiplying matrices; and what of it a load needs.

It knows no engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from peers.cases import Group, Load

REPEATS = 5
_SIDE = 1024


def read_bytes_per_s(num_bytes: int, threads: int, repeats: int = REPEATS) -> float:
    """Best of some reads of that many bytes, each thread a part of its own."""
    parts = [np.ones(num_bytes // 8 // threads, np.int64) for _ in range(threads)]
    return num_bytes / min(_together(parts) for _ in range(repeats))


def _together(parts: list[npt.NDArray[np.int64]]) -> float:
    begin = threading.Barrier(len(parts) + 1)

    def read(part: npt.NDArray[np.int64]) -> None:
        begin.wait()
        np.bitwise_or.reduce(part)

    workers = [threading.Thread(target=read, args=(part,)) for part in parts]
    for worker in workers:
        worker.start()
    begin.wait()
    start_s = time.perf_counter()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start_s


def multiply_flops(threads: int, repeats: int = REPEATS) -> dict[str, float]:
    """Best of some products of square matrices in torch, by dtype; whatever instructions the machine has."""
    import torch

    torch.set_num_threads(threads)
    found = {}
    for name in ("float32", "bfloat16"):
        a, b = (torch.randn(_SIDE, _SIDE).to(getattr(torch, name)) for _ in range(2))

        def multiply(a: torch.Tensor = a, b: torch.Tensor = b) -> None:
            torch.matmul(a, b)

        found[name] = 2 * _SIDE**3 / min(_timed(multiply) for _ in range(repeats))
    return found


def _timed(run: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def floor_s(load: Load, group: Group, weight_bytes: int, read: float, flops: float) -> float | None:
    """Least seconds of a load: each step reads all weights once, each token is multiplied with all matrices.

    Args:
        load: what runs.
        group: how large the model is.
        weight_bytes: of the weights as an engine reads them.
        read: bytes a second.
        flops: floating-point operations a second.

    Returns:
        None for what is no load.
    """
    if load.run is None or load.metric in ("cold_s",):
        return None
    step_s = max(weight_bytes / read, 2 * load.requests * (group.matrix_parameters + group.head_parameters) / flops)
    prompt_s = 2 * load.requests * load.input_len * group.matrix_parameters / flops
    if load.input_len < 64:
        return step_s * (load.output_len - 1)
    return prompt_s + step_s * (load.output_len - 1)


def share_of_floor(load: Load, value: float, floor: float) -> float:
    """How near a measured value comes to what would be possible; 1 is at the floor."""
    if load.unit == "s":
        return floor / value
    if load.title.startswith("prefill"):
        return value * floor / (load.requests * load.input_len)
    tokens = load.requests * (load.output_len - (1 if load.input_len < 64 else 0))
    return value * floor / tokens
