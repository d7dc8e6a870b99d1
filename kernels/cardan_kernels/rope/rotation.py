"""Rotary position embedding, and the write of keys and values into a paged pool, apart or in one launch.

It knows no model and no attention.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", equation 34.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cardan.errors import UnsupportedError
from cardan_kernels import float8
from cardan_kernels.kv_formats import as_stored
from cardan_kernels.launching import on_device_of
from cardan_kernels.paged import PagedKV

TILE = 1024
"""Elements of the heads that share a program."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How heads are rotated.

    Attributes:
        cos: float32 ``[context, rotary_dim / 2]``; the first ``rotary_dim`` features of a head are rotated.
        sin: float32, of the same shape.
        interleaved: whether the features of a pair are neighbours, and not half of ``rotary_dim`` apart.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.cos.shape != self.sin.shape or not (self.cos.is_contiguous() and self.sin.is_contiguous()):
            raise UnsupportedError(
                "cosines and sines must be contiguous tables of one shape, got "
                f"{list(self.cos.shape)} and {list(self.sin.shape)}. Pass such tables."
            )


def rope(x: torch.Tensor, positions: torch.Tensor, rotation: Rotation, out: torch.Tensor | None = None) -> torch.Tensor:
    """``x: [tokens, heads, dim]`` rotated by ``positions: int32 or int64 [tokens]``, computed in float32.

    Args:
        x: the last axis is contiguous, the others may be strided.
        positions: rows of the tables.
        rotation: the tables.
        out: for the result, of the shape and type of ``x``; may be ``x``.

    Raises:
        UnsupportedError: heads narrower than what is rotated, or strides that the kernel does not know.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _check(x, rotation)
    if x.numel():
        heads = _heads_together(x.shape[1], x.shape[2])
        programs = -(-x.shape[1] // heads)
        with on_device_of(x):
            _write_kernel[(x.shape[0], programs)](
                x, None, None, out, None, None, positions, rotation.cos, rotation.sin, None,
                *x.stride()[:2], 0, 0, 0, 0, *out.stride()[:2], 0, 0, 0, 0, 1.0, 1.0, x.shape[1], 0, programs,
                FORMAT=0, HEADS=heads, **_constants(rotation, x.shape[2], 0),
            )  # fmt: skip
    return out


def write_kv(k: torch.Tensor, v: torch.Tensor, kv: PagedKV, out_slots: torch.Tensor) -> None:
    """Write ``k: [tokens, kv_heads, k_dim]`` and ``v: [tokens, kv_heads, v_dim]`` to their slots of a pool.

    Args:
        k: float32, bfloat16 or float16; the last axis is contiguous, the others may be strided.
        v: likewise.
        kv: the pool. Floats of 8 bits hold ``k / k_scale`` and ``v / v_scale``, rounded to nearest even; what is
            larger than the largest of them becomes that one, and NaN stays NaN.
        out_slots: int32 or int64 ``[tokens]``; where tokens share a slot, any of them may stay (padding does).

    Raises:
        UnsupportedError: shapes other than the pool's, or strides that the kernel does not know.
    """
    _check_kv(k, v, kv)
    if k.numel():
        with on_device_of(k):
            _launch((None, k, v), None, None, kv, out_slots, None)


def rope_and_write_kv(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    rotation: Rotation,
    kv: PagedKV,
    out_slots: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, and write keys and values to their slots, in one launch: ``rope`` and ``write_kv``.

    Rotated keys are rounded to the type of ``k`` before they are stored, so that both ways give the same bits.

    Args:
        qkv: queries ``[tokens, q_heads, k_dim]``, keys and values, as ``write_kv`` takes them.
        positions: int32 or int64 ``[tokens]``.
        rotation: the tables.
        kv: the pool.
        out_slots: int32 or int64 ``[tokens]``.
        out: for the rotated queries, of the shape and type of the queries; may be the queries.

    Returns:
        The rotated queries.

    Raises:
        UnsupportedError: as ``rope`` and ``write_kv``.
    """
    q, k, v = qkv
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    _check(q, rotation)
    _check(k, rotation)
    _check_kv(k, v, kv)
    if q.numel():
        with on_device_of(q):
            _launch(qkv, positions, rotation, kv, out_slots, out)
    return out


def _launch(
    qkv: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor],
    positions: torch.Tensor | None,
    rotation: Rotation | None,
    kv: PagedKV,
    out_slots: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    """Programs for each token and some of its heads: queries first, then keys with their values."""
    q, k, v = qkv
    q_heads = 0 if q is None else q.shape[1]
    heads = _heads_together(max(q_heads, kv.kv_heads), max(kv.k_dim, kv.v_dim))
    q_programs = -(-q_heads // heads)
    eight_bits = kv.format.code != 0
    _write_kernel[(k.shape[0], q_programs - (-kv.kv_heads // heads))](
        q,
        k,
        v,
        out,
        as_stored(kv.keys),
        as_stored(kv.values),
        positions,
        None if rotation is None else rotation.cos,
        None if rotation is None else rotation.sin,
        out_slots,
        *((0, 0) if q is None else q.stride()[:2]),
        *k.stride()[:2],
        *v.stride()[:2],
        *((0, 0) if out is None else out.stride()[:2]),
        *kv.keys.stride()[:2],
        *kv.values.stride()[:2],
        kv.k_scale if eight_bits else 1.0,
        kv.v_scale if eight_bits else 1.0,
        q_heads,
        kv.kv_heads,
        q_programs,
        FORMAT=kv.format.code,
        HEADS=heads,
        **_constants(rotation, kv.k_dim, kv.v_dim),
    )


def _constants(rotation: Rotation | None, k_dim: int, v_dim: int) -> dict[str, int | bool]:
    half = 0 if rotation is None else rotation.cos.shape[1]
    rest = k_dim - 2 * half
    return {
        "INTERLEAVED": rotation is not None and rotation.interleaved,
        "HALF": half,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "BLOCK_HALF": 1 << max(half - 1, 0).bit_length(),
        "BLOCK_REST": 1 << (rest - 1).bit_length() if rest else 0,
        "BLOCK_V": 1 << max(v_dim - 1, 0).bit_length(),
        "num_warps": 4,
    }


def _heads_together(heads: int, width: int) -> int:
    """Heads of one token that share a program; a power of two."""
    return max(1, min(1 << (heads - 1).bit_length(), TILE >> (width - 1).bit_length()))


def _check(x: torch.Tensor, rotation: Rotation) -> None:
    width = 2 * rotation.cos.shape[1]
    if x.dim() != 3 or (x.numel() and x.stride(-1) != 1) or x.shape[2] < width:
        raise UnsupportedError(
            f"rotated heads must be [tokens, heads, dim], contiguous in the last axis and at least {width} wide as the "
            f"tables say, got shape {list(x.shape)} with strides {x.stride()}. Pass heads the tables were made for."
        )


def _check_kv(k: torch.Tensor, v: torch.Tensor, kv: PagedKV) -> None:
    fits = k.shape[1:] == kv.keys.shape[1:] and v.shape[1:] == kv.values.shape[1:] and k.shape[0] == v.shape[0]
    if not fits or (k.numel() and (k.stride(-1) != 1 or v.stride(-1) != 1)):
        raise UnsupportedError(
            f"keys and values must be [tokens, heads, dim] as the pool's, {list(kv.keys.shape[1:])} and "
            f"{list(kv.values.shape[1:])}, and contiguous in the last axis, got {list(k.shape)} and {list(v.shape)}. "
            "Pass the layer's own pool."
        )


@triton.jit
def _narrowed(values, scale, dtype, FORMAT: tl.constexpr):
    """What a pool stores of ``values: float32``."""
    if FORMAT != 0:
        return float8.encode(tl.div_rn(values, scale), FORMAT)
    return values.to(dtype)


@triton.jit
def _move_heads(source, target, live, scale, cos, sin, FORMAT, INTERLEAVED, HALF, K_DIM, BLOCK_HALF, BLOCK_REST):
    """Rotate heads that start at ``source: [heads]``, rounded to their own type, and store them at ``target``."""
    narrow = source.dtype.element_ty
    wanted = target.dtype.element_ty
    if HALF != 0:
        pair = tl.arange(0, BLOCK_HALF)
        c, s = tl.load(cos + pair, mask=pair < HALF, other=0.0), tl.load(sin + pair, mask=pair < HALF, other=0.0)
        inside = live[:, None] & (pair < HALF)[None, :]
        if INTERLEAVED:
            at, step = 2 * pair, 1
        else:
            at, step = pair, HALF
        places = source[:, None] + at[None, :]
        first = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(places + step, mask=inside, other=0.0).to(tl.float32)
        turned = (first * c[None, :] - second * s[None, :]).to(narrow).to(tl.float32)
        other = (second * c[None, :] + first * s[None, :]).to(narrow).to(tl.float32)
        places = target[:, None] + at[None, :]
        tl.store(places, _narrowed(turned, scale, wanted, FORMAT), mask=inside)
        tl.store(places + step, _narrowed(other, scale, wanted, FORMAT), mask=inside)
    if BLOCK_REST != 0:
        column = 2 * HALF + tl.arange(0, BLOCK_REST)
        inside = live[:, None] & (column < K_DIM)[None, :]
        rest = tl.load(source[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(target[:, None] + column[None, :], _narrowed(rest, scale, wanted, FORMAT), mask=inside)


@triton.jit(do_not_specialize=["q_heads", "kv_heads", "q_programs"])
def _write_kernel(
    q, k, v, out, keys, values, positions, cos, sin, out_slots,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head,
    key_slot, key_head, value_slot, value_head, k_scale, v_scale, q_heads, kv_heads, q_programs,
    FORMAT: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: queries, or keys with their values."""
    token, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tl.arange(0, HEADS)
    if HALF != 0:
        position = tl.load(positions + token).to(tl.int64)
        cos += position * HALF
        sin += position * HALF
    if q is not None:  # noqa: SIM102 (decided while compiling)
        if program < q_programs:
            head += program * HEADS
            _move_heads(
                q + token * q_token + head * q_head, out + token * out_token + head * out_head, head < q_heads, 1.0,
                cos, sin, 0, INTERLEAVED, HALF, K_DIM, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
    if k is not None:  # noqa: SIM102 (decided while compiling)
        if program >= q_programs:
            head += (program - q_programs) * HEADS
            live = head < kv_heads
            slot = tl.load(out_slots + token).to(tl.int64)
            _move_heads(
                k + token * k_token + head * k_head, keys + slot * key_slot + head * key_head, live, k_scale,
                cos, sin, FORMAT, INTERLEAVED, HALF, K_DIM, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
            column = tl.arange(0, BLOCK_V)
            inside = live[:, None] & (column < V_DIM)[None, :]
            source = v + token * v_token + (head * v_head)[:, None] + column[None, :]
            target = values + slot * value_slot + (head * value_head)[:, None] + column[None, :]
            wide = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            tl.store(target, _narrowed(wide, v_scale, values.dtype.element_ty, FORMAT), mask=inside)
