"""Norms, in Triton's interpreter, on the cases of their specs, and on views and widths that specs do not have."""

from __future__ import annotations

import pytest
import torch
from kernel_ops import largest_excess

from cardan.errors import UnsupportedError
from cardan_kernels.norm import add_rms_norm, rms_norm

DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_the_cases_of_the_spec(name: str, dtype: str) -> None:
    assert largest_excess(name, dtype) <= 1


def test_heads_inside_wider_rows_are_normalized_where_they_stand() -> None:
    wide = torch.randn(5, 4, 96)
    heads = wide[:, 1:3, :80]
    weight = torch.randn(80)
    assert torch.equal(rms_norm(heads, weight, 1e-6), rms_norm(heads.contiguous(), weight, 1e-6))
    normed, total = add_rms_norm(heads, heads, weight, 1e-6)
    assert torch.equal(total, 2 * heads)
    assert torch.equal(normed, rms_norm(2 * heads.contiguous(), weight, 1e-6))


def test_results_go_where_they_are_wanted_also_in_place() -> None:
    x, residual, weight = torch.randn(3, 70), torch.randn(3, 70), torch.randn(70)
    want, total = add_rms_norm(x, residual, weight, 1e-6)
    out, stream = x.clone(), residual.clone()
    got = add_rms_norm(out, stream, weight, 1e-6, out, stream)
    assert got[0] is out
    assert got[1] is stream
    assert torch.equal(out, want)
    assert torch.equal(stream, total)


def test_no_rows_are_no_launch() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="at most 32768 features"):
        rms_norm(torch.empty(1, 40000), torch.empty(40000), 1e-6)
    with pytest.raises(UnsupportedError, match="must be contiguous, got strides"):
        rms_norm(torch.empty(8, 4).T, torch.empty(8), 1e-6)
