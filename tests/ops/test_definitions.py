"""The numpy meaning of each operation against torch's, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from cardan.ops import OP_SPECS

torch = pytest.importorskip("torch")
F = torch.nn.functional


def heads_rotated(x, positions, cos, sin, interleaved):
    """Rotation by complex multiplication, a formula of its own."""
    half = cos.shape[1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = turned.reshape(*x.shape[:-1], half, 2) if interleaved else turned.unflatten(-1, (2, half)).mT
    angles = torch.complex(cos, sin)[positions.long()][:, None]
    product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angles)
    turned = product.flatten(-2) if interleaved else product.mT.flatten(-2)
    return torch.cat([turned, rest], dim=-1)


def gate(activation):
    return lambda x, size, *_: activation(x[:, :size]) * x[:, size:]


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


def linear(x, weight):
    return F.linear(x, torch.tensor(weight.values), None if weight.bias is None else torch.tensor(weight.bias))


TORCH = {
    "linear": linear,
    "linear_float32": linear,
    "linear_add": lambda x, w, residual: linear(x, w) + residual,
    "embed": lambda ids, table: F.embedding(ids.long(), torch.tensor(table.values)),
    "rms_norm": lambda x, w, eps: F.rms_norm(x, w.shape, w, eps),
    "layer_norm": lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps),
    "silu": F.silu,
    "gelu": lambda x, approximate: F.gelu(x, approximate="tanh" if approximate else "none"),
    "tanh_softcap": lambda x, cap: cap * torch.tanh(x / cap),
    "rope": heads_rotated,
    "rope_apply": heads_rotated,
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "logsumexp": lambda x: torch.logsumexp(x, dim=-1),
    "argmax": lambda x: torch.tensor([int((row == row.max()).nonzero()[0, 0]) for row in x], dtype=torch.int32),
    "topk": lambda x, k: tuple(part[:, :k] for part in torch.sort(x, dim=-1, descending=True, stable=True)),
    "cumsum": lambda x: torch.cumsum(x, dim=-1),
    "take_columns": lambda x, index: torch.gather(x, 1, index.long()),
    "scatter_add": lambda x, r, c, v: x.index_put((r.long(), c.long()), v, accumulate=True),
    "scatter_rows": lambda x, index, values: x.index_copy(0, index.long(), values),
    "permute_columns": lambda x, order: torch.index_select(x, 1, order.long()),
    "gather_rows": lambda x, index: torch.index_select(x, 0, index.long()),
    "split": lambda x, sizes: torch.split(x, sizes, dim=-1),
    "split_heads": lambda x, heads: x.unflatten(1, (heads, -1)),
    "merge_heads": lambda x: x.flatten(1),
    "is_nan": lambda x: torch.isnan(x).any(dim=-1),
    "silu_mul": gate(F.silu),
    "gelu_mul": gate(gelu_tanh),
    "add_rms_norm": lambda x, r, w, eps: (F.rms_norm(x + r, w.shape, w, eps), x + r),
}


def widened(argument):
    if not isinstance(argument, np.ndarray):
        return argument
    return argument.astype(np.float64) if np.issubdtype(argument.dtype, np.floating) else argument


@pytest.mark.parametrize("name", TORCH)
def test_reference_agrees_with_torch(name):
    spec = OP_SPECS[name]
    for arguments in spec.cases(np.random.default_rng(2)):
        wide = [widened(argument) for argument in arguments]
        got = spec.reference(*wide)
        want = TORCH[name](*(torch.tensor(part) if isinstance(part, np.ndarray) else part for part in wide))
        for one, other in zip(*(part if isinstance(part, tuple) else (part,) for part in (got, want)), strict=True):
            np.testing.assert_allclose(one, other.numpy(), rtol=1e-12, atol=1e-12)


def test_bits_are_unpacked_low_bit_first():
    mask = np.array([[0b101, 1 << 31]], np.uint32).view(np.int32)
    bits = OP_SPECS["unpack_bits"].reference(mask, 64)
    assert np.flatnonzero(bits[0]).tolist() == [0, 2, 63]
    assert OP_SPECS["unpack_bits"].reference(mask, 33).shape == (1, 33)


def test_a_row_without_any_entry_has_no_probability():
    assert OP_SPECS["logsumexp"].reference(np.full((1, 3), -np.inf)).tolist() == [-np.inf]
