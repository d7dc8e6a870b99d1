"""Rotations and writes into pools, in Triton's interpreter: specs' cases, and all bits of floats of 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_ops import largest_excess

from cardan.errors import UnsupportedError
from cardan_kernels import float8
from cardan_kernels.kv_formats import FORMATS, kv_format
from cardan_kernels.paged import PagedKV
from cardan_kernels.rope import Rotation, rope, rope_and_write_kv, write_kv

EIGHT_BITS = tuple(dtype for dtype, found in FORMATS.items() if found.code)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_cases_of_the_spec(dtype: str) -> None:
    assert largest_excess("rope", dtype) <= 1


def make_pool(dtype: torch.dtype, k_dim: int, v_dim: int, scales: tuple[float, float] = (1.0, 1.0)) -> PagedKV:
    keys, values = (torch.full((20, 3, dim), float("nan")).to(dtype) for dim in (k_dim, v_dim))
    return PagedKV(keys, values, torch.zeros((1, 1), dtype=torch.int32), 1, *scales)


def make_rotation(half: int, interleaved: bool = False) -> Rotation:
    angles = torch.arange(64)[:, None] * 0.3 ** torch.arange(half)[None, :]
    return Rotation(torch.cos(angles), torch.sin(angles), interleaved)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


@pytest.mark.parametrize("pool", list(FORMATS))
@pytest.mark.parametrize("interleaved", [False, True])
def test_one_launch_gives_the_bits_of_two(pool: torch.dtype, interleaved: bool) -> None:
    q, k, v = torch.randn(4, 7, 24), torch.randn(4, 3, 24), torch.randn(4, 3, 20)
    if pool is not torch.float32:
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    positions, slots = torch.tensor([5, 0, 63, 1], dtype=torch.int32), torch.tensor([7, 19, 0, 4])
    rotation = make_rotation(8, interleaved)
    together, apart = make_pool(pool, 24, 20, (0.5, 3.0)), make_pool(pool, 24, 20, (0.5, 3.0))
    turned = rope_and_write_kv((q, k, v), positions, rotation, together, slots)
    write_kv(rope(k, positions, rotation), v, apart, slots)
    assert torch.equal(turned, rope(q, positions, rotation))
    for one, other in ((together.keys, apart.keys), (together.values, apart.values)):
        assert torch.equal(bits(one), bits(other))
    untouched = [slot for slot in range(20) if slot not in slots.tolist()]
    assert together.keys.float()[untouched].isnan().all()
    assert together.values.float()[untouched].isnan().all()


@pytest.mark.parametrize("pool", EIGHT_BITS)
def test_pools_of_8_bits_hold_what_torch_rounds_the_quotient_to(pool: torch.dtype) -> None:
    k, v = torch.randn(6, 3, 32).bfloat16() * 3, torch.randn(6, 3, 16).bfloat16() * 1000
    kv, slots = make_pool(pool, 32, 16, (0.37, 1.9)), torch.arange(3, 9)
    write_kv(k, v, kv, slots)
    largest = torch.finfo(pool).max
    for held, given, scale in ((kv.keys, k, 0.37), (kv.values, v, 1.9)):
        quotient = given.float() / torch.tensor(scale, dtype=torch.float32)
        assert torch.equal(held[slots].float(), quotient.clamp(-largest, largest).to(pool).float())


@triton.jit
def _encode_kernel(x, out, COUNT: tl.constexpr, FORMAT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, float8.encode(tl.load(x + at), FORMAT))


@triton.jit
def _decode_kernel(codes, out, FORMAT: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, float8.decode(tl.load(codes + at), FORMAT).to(tl.float32))


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_every_code_means_what_torch_says(dtype: torch.dtype) -> None:
    codes, out = torch.arange(256, dtype=torch.uint8), torch.empty(256)
    _decode_kernel[(1,)](codes, out, kv_format(dtype).code)
    want = codes.view(dtype).float()
    finite = torch.isfinite(want)
    assert torch.equal((out * kv_format(dtype).unit)[finite], want[finite])


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_values_round_to_nearest_even_at_every_boundary(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    exact = codes[torch.isfinite(codes)].sort().values
    middles = (exact[1:] + exact[:-1]) / 2
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-30, -1e-30])
    beside = [torch.nextafter(middles, torch.tensor(side)) for side in (-1e9, 1e9)]
    x = torch.cat((exact, middles, *beside, torch.randn(2000) * 10, torch.randn(2000) * 0.01, special))
    x = torch.nn.functional.pad(x, (0, 8192 - len(x)))
    out = torch.empty(8192, dtype=torch.uint8)
    _encode_kernel[(1,)](x, out, 8192, kv_format(dtype).code)
    largest = torch.finfo(dtype).max
    got, want = out.view(dtype).float(), x.clamp(-largest, largest).to(dtype).float()
    assert torch.equal(got.isnan(), x.isnan())
    assert torch.equal(got[~x.isnan()], want[~x.isnan()])


def test_slots_beyond_two_gigabytes_are_found() -> None:
    """Pages of memory are committed as they are touched, so that most of this pool takes none."""
    heads, dim = 8, 256
    slots = 2**31 // (heads * dim) + 3
    pool = [torch.from_numpy(np.zeros(slots * heads * dim, np.uint8)).view(torch.float8_e5m2) for _ in range(2)]
    kv = PagedKV(*(part.view(slots, heads, dim) for part in pool), torch.zeros((1, 1), dtype=torch.int32))
    k, v = torch.ones(2, heads, dim), torch.full((2, heads, dim), 2.0)
    write_kv(k, v, kv, torch.tensor([slots - 1, 5], dtype=torch.int32))
    for slot in (slots - 1, 5):
        assert (kv.keys[slot].float() == 1).all()
        assert (kv.values[slot].float() == 2).all()


def test_rotation_in_place_of_views() -> None:
    wide = torch.randn(3, 5, 40)
    positions, rotation = torch.tensor([1, 2, 3]), make_rotation(4)
    want = rope(wide[:, 1:4, :16].contiguous(), positions, rotation)
    view = wide[:, 1:4, :16]
    assert rope(view, positions, rotation, view) is view
    assert torch.equal(view, want)


def test_no_tokens_are_taken_whatever_their_strides() -> None:
    nothing, positions = torch.empty(0).as_strided((0, 3, 8), (0, 0, 0)), torch.empty(0, dtype=torch.int32)
    kv = make_pool(torch.float32, 8, 8)
    assert rope(nothing, positions, make_rotation(4)).shape == (0, 3, 8)
    write_kv(nothing, nothing, kv, positions)
    assert rope_and_write_kv((nothing,) * 3, positions, make_rotation(4), kv, positions).shape == (0, 3, 8)
    assert kv.keys.isnan().all()


REFUSED: dict[str, tuple[Any, str]] = {
    "narrow": (lambda: rope(torch.empty(1, 1, 4), torch.zeros(1), make_rotation(4)), "at least 8 wide"),
    "tables": (lambda: Rotation(torch.empty(4, 2), torch.empty(4, 3)), "tables of one shape"),
    "pool": (
        lambda: write_kv(torch.empty(1, 2, 8), torch.empty(1, 2, 8), make_pool(torch.float32, 8, 8), torch.zeros(1)),
        r"as the pool's, \[3, 8\]",
    ),
    "type": (lambda: kv_format(torch.int32), "must be one of float32, bfloat16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_kernels_do_not_take_is_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(UnsupportedError, match=message):
        call()
