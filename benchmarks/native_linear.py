"""Speed of the native linears by format and number of rows, beside reading memory and beside torch's own linear.

It knows no model but the shapes of two. Weights are held in as many copies as no cache holds, so that each call reads
memory as a decode step does. It prints one line for each format, shape, kind of activations and number of rows; GB/s
count the packed weight once, GFLOP/s two operations for each weight and row. Times are medians.

    python benchmarks/native_linear.py --variant avx2 --formats Q4_1 Q4_K BF16 --rows 1 8 32 512
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

import cardan_native
from cardan.platform import LinearSpec
from cardan.quantization import FORMATS, tensor_bytes
from cardan.types import TensorView
from cardan_cpu.native_linear import ROUNDINGS, NativeLinear

SHAPES = {
    "135M qkv": (960, 576),
    "135M o": (576, 576),
    "135M gate_up": (3072, 576),
    "135M down": (576, 1536),
    "135M head": (49152, 576),
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
}
"""Output and inner features of SmolLM2-135M and of Qwen3-0.6B."""

COPIES_BYTES = 96 << 20
READ_BYTES = 256 << 20
SECONDS = 0.4
LEAST, MOST = 5, 400


def median_s(call: Callable[[], object]) -> float:
    """The median time of a call, over about ``SECONDS``."""
    call()
    times: list[float] = []
    while len(times) < LEAST or (sum(times) < SECONDS and len(times) < MOST):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_speed(threads: int) -> float:
    """GB/s of ``threads`` threads that each look for the largest number in a part of a large array."""
    parts = np.array_split(np.ones(READ_BYTES // 4, dtype=np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        return READ_BYTES / median_s(lambda: list(pool.map(np.max, parts))) / 1e9


def random_view(fmt: str, shape: tuple[int, int], rng: np.random.Generator) -> TensorView:
    """Any bytes; where they are floats, none that is slow to compute with."""
    raw = rng.integers(0, 256, tensor_bytes(fmt, shape), dtype=np.uint8)
    if FORMATS[fmt].block_elements == 1:
        values = rng.normal(size=shape[0] * shape[1]).astype(np.float32)
        narrow = {"F32": values, "F16": values.astype(np.float16), "BF16": (values.view(np.uint32) >> 16).astype("<u2")}
        raw = narrow[fmt].view(np.uint8)
    return TensorView("random", fmt, shape, raw.data)


def activations_of(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> npt.NDArray[Any]:
    """Random numbers of a type; bfloat16 stands in uint16."""
    values = rng.normal(size=shape).astype(np.float32)
    return values if dtype == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16)


def linear_times(
    native: Any, fmt: str, shape: tuple[int, int], activations: str, rows: Sequence[int], dtype: str
) -> list[str]:
    """One line for each number of rows."""
    rng = np.random.default_rng(0)
    view = random_view(fmt, shape, rng)
    spec = LinearSpec(name="w", out_features=shape[0], in_features=shape[1], dtype=dtype)
    method = NativeLinear(native, activations)
    weights = [method.pack((view,), spec, None)]
    weights += [method.pack((view,), spec, None) for _ in range(COPIES_BYTES // weights[0].num_bytes)]
    lines = []
    for count in rows:
        x = native.Tensor.from_bits(activations_of(rng, (count, shape[1]), dtype), dtype)
        turn = iter(range(1 << 30))
        seconds = median_s(lambda x=x, turn=turn: weights[next(turn) % len(weights)].apply(x))
        lines.append(_line(f"{fmt:16} {activations:6}", shape, count, seconds, weights[0].num_bytes))
    return lines


def torch_times(shape: tuple[int, int], rows: Sequence[int], threads: int, dtype: str) -> list[str]:
    """As ``linear_times``, of torch's own linear; nothing where torch is not installed."""
    try:
        import torch
    except ImportError:
        return []
    torch.set_num_threads(threads)
    of = getattr(torch, dtype)
    num_bytes = of.itemsize * shape[0] * shape[1]
    weights = [torch.randn(shape, dtype=of) for _ in range(1 + COPIES_BYTES // num_bytes)]
    lines = []
    for count in rows:
        x, turn = torch.randn((count, shape[1]), dtype=of), iter(range(1 << 30))
        with torch.inference_mode():
            seconds = median_s(lambda x=x, turn=turn: torch.nn.functional.linear(x, weights[next(turn) % len(weights)]))
        lines.append(_line(f"{'torch ' + dtype:16} {'float':6}", shape, count, seconds, num_bytes))
    return lines


def _line(what: str, shape: tuple[int, int], rows: int, seconds: float, num_bytes: int) -> str:
    speed, work = num_bytes / seconds / 1e9, 2 * rows * shape[0] * shape[1] / seconds / 1e9
    size = f"{shape[0]:6} x {shape[1]:4} rows {rows:4}"
    return f"{what} {size}  {seconds * 1e3:9.3f} ms {speed:7.1f} GB/s {work:7.0f} GFLOP/s"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", choices=cardan_native.available(), default=cardan_native.chosen())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", nargs="+", default=["Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0", "BF16", "F32"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of what is multiplied")
    parser.add_argument("--activations", nargs="+", choices=ROUNDINGS, default=list(ROUNDINGS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 512])
    options = parser.parse_args()
    native = cardan_native.load(options.variant)
    native.set_threads(options.threads)
    _say(f"{options.variant}, {options.threads} threads; reading memory: {read_speed(options.threads):.1f} GB/s")
    for name in options.shapes:
        _say(name)
        for fmt in options.formats:
            if SHAPES[name][1] % FORMATS[fmt].block_elements:
                _say(f"{fmt} has blocks of {FORMATS[fmt].block_elements}, which do not fill these rows")
                continue
            quantized = FORMATS[fmt].block_elements > 1
            for activations in options.activations if quantized else ["float"]:
                for line in linear_times(native, fmt, SHAPES[name], activations, options.rows, options.dtype):
                    _say(line)
        for line in torch_times(SHAPES[name], options.rows, options.threads, options.dtype):
            _say(line)
    _say(f"reading memory again: {read_speed(options.threads):.1f} GB/s")


if __name__ == "__main__":
    main()
