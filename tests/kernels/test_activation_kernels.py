"""Gated activations, in Triton's interpreter, on the cases of their specs, and their hyperbolic tangent near 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_ops import largest_excess

from cardan.errors import UnsupportedError
from cardan_kernels.activation import silu_mul
from cardan_kernels.elementary import tanh


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_the_cases_of_the_spec(name: str, dtype: str) -> None:
    assert largest_excess(name, dtype) <= 1


def test_rows_of_several_blocks_and_results_where_they_are_wanted() -> None:
    gate_up = torch.randn(2, 2 * 1500)
    wide = torch.full((2, 1600), float("nan"))
    got = silu_mul(gate_up, 1500, wide[:, :1500])
    want = torch.nn.functional.silu(gate_up[:, :1500].double()) * gate_up[:, 1500:].double()
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-6)
    assert wide[:, 1500:].isnan().all()


def test_no_tokens_are_taken_whatever_their_strides() -> None:
    assert silu_mul(torch.empty(0).as_strided((0, 12), (0, 0)), 6).shape == (0, 6)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"must be \[tokens, 12\]"):
        silu_mul(torch.empty(2, 10), 6)


@triton.jit
def _tanh_kernel(x, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, tanh(tl.load(x + at)))


def test_the_hyperbolic_tangent_keeps_its_digits_near_zero_and_saturates() -> None:
    sizes = np.concatenate((np.logspace(-30, 2, 4000), np.linspace(0.55, 0.65, 96)))
    x = torch.from_numpy(np.concatenate((sizes, -sizes))[:8192].astype(np.float32))
    out = torch.empty_like(x)
    _tanh_kernel[(1,)](x, out, 8192)
    exact = np.tanh(x.double().numpy())
    assert (np.abs(out.double().numpy() - exact) / np.abs(exact)).max() <= 5 * 2.0**-24
