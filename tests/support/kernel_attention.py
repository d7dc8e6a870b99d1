"""One attention step on scattered slots of a dirty pool, as the kernels take it, and what it must give in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cardan.ops.definitions import NumpyArray
from cardan.references.attention import attend
from cardan.testing.conformance.attention_bound import attention_bound
from cardan.types import LayerKV
from cardan_kernels.attention import (
    AttentionShape,
    DecodeRows,
    DecodeSplits,
    Scoring,
    Splits,
    decode,
    plan_tiles,
    prefill,
    scratch_size,
    tokens_per_tile,
)
from cardan_kernels.paged import PagedKV

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """A step: ``rows`` are pairs of cached and new tokens."""

    rows: tuple[tuple[int, int], ...]
    layer: LayerKV
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    page: int = 1
    slots_of_pages: bool = False
    scales: tuple[float, float] = (1.0, 1.0)
    seed: int = 0


@dataclass(slots=True)
class Step:
    """The same with its tensors. Rows stand in lines of the table in reverse; line 0 is padding."""

    case: StepCase
    q: torch.Tensor
    kv: PagedKV
    scoring: Scoring
    starts: np.ndarray
    lengths: np.ndarray
    lines: np.ndarray
    want: NumpyArray
    allowed: NumpyArray

    def prefill(self) -> torch.Tensor:
        layer = self.case.layer
        shape = AttentionShape(
            layer.q_heads, layer.kv_heads, layer.k_dim, layer.v_dim, self.q.dtype, self.kv.keys.dtype
        )
        tokens = tokens_per_tile(shape, "interpreter")
        tiles = torch.from_numpy(plan_tiles(self.starts, self.lengths, self.lines, tokens))
        return prefill(self.q, self.kv, tiles, self.scoring)

    def decode(self, splits: Splits, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Results of the last token of each row, or of some rows."""
        chosen = np.arange(len(self.lengths)) if rows is None else np.asarray(rows)
        layer = self.case.layer
        size = scratch_size(len(chosen), layer.q_heads, layer.v_dim, splits)
        scratch = torch.full((size,), float("nan")) if size else None
        at = self.starts[1:][chosen] - 1
        batch = DecodeRows(
            torch.from_numpy(self.lengths[chosen]), torch.from_numpy(self.lines[chosen]), torch.from_numpy(at)
        )
        out = torch.full((len(self.q), layer.q_heads * layer.v_dim), float("nan"), dtype=self.q.dtype)
        decode(self.q, self.kv, batch, self.scoring, DecodeSplits(splits, scratch), out)
        return out[torch.from_numpy(at).long()]

    def excess(self, got: torch.Tensor, last_only: bool = False) -> float:
        """The largest difference over what rounding explains: up to 1 is fine."""
        at = self.starts[1:] - 1 if last_only else np.arange(len(self.q))
        values = got.double().numpy()
        assert np.isfinite(values).all()
        return float((np.abs(values - self.want[at]) / self.allowed[at]).max())


def make_step(case: StepCase) -> Step:
    """Fill a pool, all of whose other slots hold NaN, and attend in float64 over what it holds."""
    rng = np.random.default_rng(case.seed)
    layer, page = case.layer, case.page
    stored = case.kv_dtype or case.dtype
    pages = [-(-(cached + new) // page) for cached, new in case.rows]
    order = rng.permutation(np.arange(1, sum(pages) + 4, dtype=np.int32))
    keys, values = (
        torch.full(((sum(pages) + 4) * page, layer.kv_heads, dim), float("nan")).to(stored)
        for dim in (layer.k_dim, layer.v_dim)
    )
    longest = max(*pages, 1) * page
    table = np.full((len(case.rows) + 1, longest // page), order[-1], np.int32)
    sinks = np.linspace(-1.0, 4.0, layer.q_heads).astype(np.float32) if layer.sinks else None
    queries, want, allowed = [], [], []
    for number, (cached, new) in enumerate(case.rows):
        length, line = cached + new, len(case.rows) - number
        mine, order = order[: pages[number]], order[pages[number] :]
        table[line, : len(mine)] = mine
        slots = (mine[:, None].astype(np.int64) * page + np.arange(page)).reshape(-1)[:length]
        q = torch.from_numpy(rng.normal(size=(new, layer.q_heads, layer.k_dim))).to(case.dtype)
        held = []
        for pool, scale in ((keys, case.scales[0]), (values, case.scales[1])):
            exact = torch.from_numpy(rng.normal(size=(length, *pool.shape[1:]))) / scale
            pool[slots] = exact.to(case.dtype).to(stored)
            held.append(pool[slots].double().numpy() * np.float64(np.float32(scale)))
        queries.append(q)
        exact_q = q.double().numpy()
        result = attend(exact_q, *held, layer, sinks)
        want.append(result.out)
        allowed.append(attention_bound(exact_q, *held, layer, result, NAMES[case.dtype]))
    if case.slots_of_pages:
        table = (table[:, :, None] * page + np.arange(page, dtype=np.int32)).reshape(len(table), -1)
    counts = [new for _, new in case.rows]
    return Step(
        case,
        torch.cat(queries),
        PagedKV(
            keys,
            values,
            torch.from_numpy(table.astype(np.int64 if case.slots_of_pages else np.int32)),
            1 if case.slots_of_pages else page,
            *case.scales,
        ),
        Scoring(layer.scale, layer.window, layer.softcap, None if sinks is None else torch.from_numpy(sinks)),
        np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        np.array([cached + new for cached, new in case.rows], np.int32),
        np.arange(len(case.rows), 0, -1, dtype=np.int32),
        np.concatenate(want),
        np.concatenate(allowed),
    )
