"""What the thread pool of the native kernels loses to a process that takes one core: a step of some 200 kernels, timed
quiet and disturbed in turns.

It needs cardan-native only. The step is recorded once and replayed, as a decode step is: norms, linears and activations
of a small model's size. The other process spins on the last core that this one may use.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import cardan_native

HIDDEN, INNER = 576, 1536
LAYERS = 29
KERNELS_A_LAYER = 7
BLOCK = 32
"""Values of a block of Q8_0."""
SPIN = "import os; os.sched_setaffinity(0, {%d})\nwhile True: pass"


def record(native: cardan_native.Kernels, rows: int) -> cardan_native.Graph:
    """A step of ``LAYERS * KERNELS_A_LAYER`` kernels."""
    rng = np.random.default_rng(0)

    def weight(out: int, inner: int) -> Any:
        blocks = rng.integers(0, 256, (out * inner // BLOCK, 2 + BLOCK), dtype=np.uint8)
        blocks[:, :2] = np.full(1, 0.01 / np.sqrt(inner), np.float16).view(np.uint8)  # each block's scale
        return native.pack_linear("Q8_0", [blocks.reshape(-1)], [out], inner, "float32", activations="int8")

    attend, out, up, down = (
        weight(*shape) for shape in ((960, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    gains = cardan_native.to_tensor(native, np.ones(HIDDEN, np.float32))
    x = cardan_native.to_tensor(native, rng.standard_normal((rows, HIDDEN)).astype(np.float32))
    graph = native.Graph()
    with graph:
        for _ in range(LAYERS):
            qkv = native.linear(native.rms_norm(x, gains, 1e-5), attend)
            x = native.linear_add(qkv.columns(0, HIDDEN).contiguous(), out, x)
            hidden = native.silu_mul(native.linear(native.rms_norm(x, gains, 1e-5), up), INNER)
            x = native.linear_add(hidden, down, x)
    return graph


@contextmanager
def disturber(core: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that spins on a core, stopped at first."""
    process = subprocess.Popen([sys.executable, "-c", SPIN % core])
    time.sleep(0.3)
    process.send_signal(signal.SIGSTOP)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def times_of(graph: cardan_native.Graph, seconds: float) -> list[float]:
    """Milliseconds of steps, one after the other, for a while."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        graph.replay()
        times.append((time.perf_counter() - start) * 1000)
    return times


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Times of steps, quiet and disturbed."""
    native = cardan_native.load(arguments.variant)
    native.set_threads(arguments.threads)
    graph = record(native, arguments.rows)
    times: dict[str, list[float]] = {"quiet": [], "disturbed": []}
    with disturber(max(os.sched_getaffinity(0))) as other:
        times_of(graph, arguments.seconds)
        for _ in range(arguments.rounds):
            times["quiet"] += times_of(graph, arguments.seconds)
            other.send_signal(signal.SIGCONT)
            time.sleep(0.02)
            times["disturbed"] += times_of(graph, arguments.seconds)
            other.send_signal(signal.SIGSTOP)
            time.sleep(0.02)
    return times


def main() -> None:
    """Write medians and their ratio to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--variant", default=cardan_native.chosen())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each part of a round")
    times = measure(arguments := parser.parse_args())
    quiet, disturbed = (statistics.median(times[name]) for name in ("quiet", "disturbed"))
    means = {name: statistics.fmean(values) for name, values in times.items()}
    sys.stdout.write(
        f"{LAYERS * KERNELS_A_LAYER} kernels on {arguments.threads} threads, {arguments.variant}, "
        f"rows {arguments.rows}\n"
        f"quiet      {quiet:.2f} ms a step (mean {means['quiet']:.2f}, {len(times['quiet'])} steps)\n"
        f"disturbed  {disturbed:.2f} ms a step (mean {means['disturbed']:.2f}, {len(times['disturbed'])} steps)\n"
        f"disturbed / quiet {disturbed / quiet:.2f}, of means {means['disturbed'] / means['quiet']:.2f}\n"
    )


if __name__ == "__main__":
    main()
