"""Times of single kernels on a GPU against two measured ceilings, and against torch's own.

It knows no model. Without a GPU nothing is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from device_parts import Clock
from torch.nn import functional

from cardan.types import TensorView
from cardan_kernels import activation, attention, linear, norm, sampling
from cardan_kernels.attention import AttentionShape
from cardan_kernels.chips import chip_of
from cardan_kernels.paged import PagedKV

DEVICE = "cuda"
HEADS, KV_HEADS, DIM = 32, 8, 128
REPEATS, WARM_UPS = 20, 3


def time_us(run: Callable[[], Any]) -> float:
    """Median microseconds of a call, by the GPU's own clock, with caches as they come."""
    for _ in range(WARM_UPS):
        run()
    spans = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        spans.append(1000 * start.elapsed_time(end))
    return statistics.median(spans)


def ceilings() -> dict[str, float]:
    """Bytes a second of a copy, read and written, and operations a second of a large bfloat16 GEMM."""
    source = torch.empty(1 << 29, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / time_us(lambda: target.copy_(source)) / 1e3
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    gemm = 2 * 8192**3 / time_us(lambda: a @ a) / 1e6
    return {"copy_gb_s": round(copy, 1), "bf16_gemm_tflop_s": round(gemm, 1)}


def decode_attention(rows: int, length: int) -> dict[str, float]:
    """Decode over scattered slots, against torch's SDPA over keys that lie in order."""
    slots = torch.randperm(rows * length, device=DEVICE).to(torch.int32)
    keys, values = (torch.randn(rows * length, KV_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    kv = PagedKV(keys, values, slots.view(rows, length))
    q = torch.randn(rows, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    lengths = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)
    lines = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    shape = AttentionShape(HEADS, KV_HEADS, DIM, DIM, q.dtype, keys.dtype)
    units = torch.cuda.get_device_properties(0).multi_processor_count
    splits = attention.choose_splits(rows, attention.head_tiles(shape, chip_of(q.device)), length, units)
    size = attention.scratch_size(rows, HEADS, DIM, splits)
    split = attention.DecodeSplits(splits, torch.empty(size, dtype=torch.float32, device=DEVICE))
    own = time_us(
        lambda: attention.decode(q, kv, attention.DecodeRows(lengths, lines), attention.Scoring(DIM**-0.5), split)
    )
    wide = q.view(rows, KV_HEADS, HEADS // KV_HEADS, DIM)
    ordered = [x.view(rows, length, KV_HEADS, DIM).transpose(1, 2) for x in (keys, values)]
    theirs = time_us(lambda: functional.scaled_dot_product_attention(wide, *ordered))
    return {"us": own, "torch_us": theirs, "gb_s": 2 * keys.nbytes / own / 1e3}


def prefill_attention(length: int) -> dict[str, float]:
    """One prompt over scattered slots, against torch's SDPA over keys that lie in order."""
    keys, values = (torch.randn(length, KV_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    kv = PagedKV(keys, values, torch.randperm(length, device=DEVICE).to(torch.int32)[None])
    q = torch.randn(length, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    shape = AttentionShape(HEADS, KV_HEADS, DIM, DIM, q.dtype, keys.dtype)
    tokens = attention.tokens_per_tile(shape, chip_of(q.device))
    starts, lengths, lines = (np.array(x, np.int32) for x in ((0, length), (length,), (0,)))
    tiles = torch.from_numpy(attention.plan_tiles(starts, lengths, lines, tokens)).to(DEVICE)
    own = time_us(lambda: attention.prefill(q, kv, tiles, attention.Scoring(DIM**-0.5)))
    parts = [x.transpose(0, 1)[None] for x in (q, keys, values)]
    theirs = time_us(lambda: functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True))
    return {"us": own, "torch_us": theirs, "tflop_s": 2 * HEADS * DIM * length**2 / own / 1e6}


def coded_linear(rows: int, fmt: str, block_bytes: int, elements: int) -> dict[str, float]:
    """A coded weight of 4096 x 14336, against torch's bfloat16 GEMM of the same size."""
    out, inner = 14336, 4096
    blocks = np.random.default_rng(1).integers(0, 255, (out * inner // elements, block_bytes), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    view = TensorView("w", fmt, (out, inner), blocks.reshape(-1).data)
    matrix = linear.pack_coded((view,), inner, DEVICE)
    x = torch.randn(rows, inner, device=DEVICE, dtype=torch.bfloat16)
    dense = torch.randn(out, inner, device=DEVICE, dtype=torch.bfloat16)
    own = time_us(lambda: linear.coded_linear(x, matrix))
    theirs = time_us(lambda: functional.linear(x, dense))
    return {"us": own, "torch_us": theirs, "gb_s": matrix.num_bytes / own / 1e3}


def small_kernels() -> dict[str, dict[str, float]]:
    """Norm, gate and sampling, against torch's composition."""
    x, weight = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16), torch.ones(4096, device=DEVICE)
    gates = torch.randn(2048, 2 * 14336, device=DEVICE, dtype=torch.bfloat16)
    scores = torch.randn(64, 151936, device=DEVICE)
    ones = torch.ones(64, device=DEVICE)
    whole = torch.ones(64, dtype=torch.int32, device=DEVICE)
    inputs = sampling.DrawInputs(
        temperature=ones, top_k=151936 * whole, top_p=0.9 * ones, min_p=0 * ones,
        seeds=torch.zeros(64, 2, dtype=torch.int32, device=DEVICE), positions=whole,
    )  # fmt: skip
    half = gates.shape[1] // 2
    return {
        "rms_norm 4096x4096": {
            "us": (own := time_us(lambda: norm.rms_norm(x, weight, 1e-5))),
            "torch_us": time_us(lambda: functional.rms_norm(x, (4096,), weight.to(x.dtype), 1e-5)),
            "gb_s": 2 * x.nbytes / own / 1e3,
        },
        "silu_mul 2048x14336": {
            "us": (own := time_us(lambda: activation.silu_mul(gates, half))),
            "torch_us": time_us(lambda: functional.silu(gates[:, :half]) * gates[:, half:]),
            "gb_s": 1.5 * gates.nbytes / own / 1e3,
        },
        "draw top_p 64x151936": {
            "us": time_us(lambda: sampling.draw_tokens(scores, inputs)),
            "torch_us": time_us(lambda: torch.sort(scores, dim=-1, descending=True)),
        },
    }


def measure(clock: Clock) -> dict[str, Any]:
    """All of it, as far as the time goes."""
    found: dict[str, Any] = {"ceilings": ceilings(), "kernels": {}}
    runs: dict[str, Callable[[], dict[str, float]]] = {
        f"decode attention {rows}x{length}": lambda rows=rows, length=length: decode_attention(rows, length)
        for rows, length in ((1, 8192), (8, 4096), (64, 2048), (256, 1024))
    }
    runs |= {f"prefill attention {n}": lambda n=n: prefill_attention(n) for n in (2048, 8192)}
    runs |= {
        f"{fmt} linear {rows} rows": lambda rows=rows, fmt=fmt, size=size: coded_linear(rows, fmt, *size)
        for fmt, size in (("Q4_0", (18, 32)), ("Q8_0", (34, 32)))
        for rows in (1, 8, 64, 1024)
    }
    with torch.inference_mode():
        for name, run in runs.items():
            if clock.left_s <= 0:
                break
            found["kernels"][name] = run()
        if clock.left_s > 0:
            found["kernels"] |= small_kernels()
    return found
