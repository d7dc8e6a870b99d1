"""Attention kernels, in Triton's interpreter, against dense attention in float64, over all kinds of layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_attention import StepCase, make_step

from cardan.testing.conformance.attention_checks import DECODE, KINDS, MIXED, PREFILL, make_layer
from cardan_kernels.attention import (
    DecodeRows,
    DecodeSplits,
    Scoring,
    Splits,
    choose_splits,
    decode,
    fixed_splits,
    prefill,
)
from cardan_kernels.paged import PagedKV

ROWS = ((0, 1), (0, 13), (40, 9), (95, 2), (0, 70))
"""A first token alone, a prompt, an extension, one across a block's end, and one of several tiles."""
DECODED = tuple((length - 1, 1) for length in (1, 2, 32, 33, 130))
NARROW = (torch.bfloat16, torch.float16)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


def layer_of(kind: str):
    return make_layer(**KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_of_every_kind_of_layer(kind: str) -> None:
    step = make_step(StepCase(rows=ROWS, layer=layer_of(kind)))
    assert step.excess(step.prefill()) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_decode_of_every_kind_of_layer(kind: str) -> None:
    step = make_step(StepCase(rows=DECODED, layer=layer_of(kind)))
    assert step.excess(step.decode(Splits(3)), last_only=True) <= 1


@pytest.mark.parametrize("kind", ["grouped", "softcap-window", "sinks"])
def test_decode_without_a_second_pass(kind: str) -> None:
    step = make_step(StepCase(rows=DECODED, layer=layer_of(kind)))
    assert step.excess(step.decode(Splits(1)), last_only=True) <= 1


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.bfloat16, "grouped"), (torch.float16, "grouped"), (torch.bfloat16, "softcap-window"), (NARROW[1], "sinks")],
)
def test_narrow_types(dtype: torch.dtype, kind: str) -> None:
    step = make_step(StepCase(rows=ROWS, layer=layer_of(kind), dtype=dtype))
    assert step.excess(step.prefill()) <= 1
    assert step.excess(step.decode(Splits(2)), last_only=True) <= 1


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("slots_of_pages", [False, True], ids=["pages", "slots"])
def test_pages_by_a_table_of_pages_and_by_a_table_of_slots(page: int, slots_of_pages: bool) -> None:
    rows = ((63, 2), (100, 1))
    step = make_step(StepCase(rows=rows, layer=layer_of("window"), page=page, slots_of_pages=slots_of_pages))
    assert step.excess(step.prefill()) <= 1
    assert step.excess(step.decode(Splits(2)), last_only=True) <= 1


@pytest.mark.parametrize(
    ("stored", "dtype"), [*((stored, torch.float32) for stored in EIGHT_BITS), (EIGHT_BITS[0], torch.bfloat16)]
)
def test_pools_of_8_bits_with_scales(stored: torch.dtype, dtype: torch.dtype) -> None:
    case = StepCase(
        rows=((0, 13), (40, 1), (64, 9)), layer=layer_of("sinks"), dtype=dtype, kv_dtype=stored, scales=(0.37, 1.9)
    )
    step = make_step(case)
    assert step.excess(step.prefill()) <= 1
    assert step.excess(step.decode(Splits(3)), last_only=True) <= 1


def test_the_scales_matter() -> None:
    case = StepCase(rows=((0, 13),), layer=layer_of("grouped"), kv_dtype=torch.float8_e4m3fn, scales=(0.37, 1.9))
    step = make_step(case)
    for changed in ({"k_scale": 1.0}, {"v_scale": 1.0}):
        fields = {
            name: getattr(step.kv, name) for name in ("keys", "values", "table", "page_size", "k_scale", "v_scale")
        }
        other = make_step(case)
        other.kv = type(step.kv)(**{**fields, **changed})
        assert step.excess(other.prefill()) > 10


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_pools_of_16_bits_under_float32(stored: torch.dtype) -> None:
    step = make_step(StepCase(rows=((0, 5), (40, 3)), layer=layer_of("grouped"), kv_dtype=stored))
    assert step.excess(step.prefill()) <= 1


def test_float32_pools_under_bfloat16() -> None:
    step = make_step(
        StepCase(rows=((0, 5), (40, 3)), layer=layer_of("grouped"), dtype=torch.bfloat16, kv_dtype=torch.float32)
    )
    assert step.excess(step.prefill()) <= 1


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(7, 1), (40, 1), (70, 1)])
def test_groups_of_heads_of_any_size(q_heads: int, kv_heads: int) -> None:
    layer = make_layer(q_heads=q_heads, kv_heads=kv_heads)
    step = make_step(StepCase(rows=((0, 1), (33, 2)), layer=layer))
    assert step.excess(step.prefill()) <= 1
    assert step.excess(step.decode(Splits(2)), last_only=True) <= 1


def test_rows_without_keys_give_zeros_and_disturb_no_other() -> None:
    step = make_step(StepCase(rows=DECODED[:3], layer=layer_of("sinks")))
    for splits in (Splits(1), fixed_splits(32, 32)):
        whole = step.decode(splits)
        lengths = step.lengths
        step.lengths, step.lines = lengths * np.array([1, 0, 1], np.int32), step.lines
        empty = step.decode(splits)
        step.lengths = lengths
        assert torch.equal(empty[1], torch.zeros_like(empty[1]))
        assert torch.equal(empty[0], whole[0])
        assert torch.equal(empty[2], whole[2])


@pytest.mark.parametrize(
    ("kind", "dtype"), [("grouped", torch.bfloat16), ("window", torch.float32), ("sinks", torch.float32)]
)
def test_parts_of_a_fixed_size_make_decode_independent_of_the_batch_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    step = make_step(StepCase(rows=tuple((n - 1, 1) for n in (33, 130, 7)), layer=layer_of(kind), dtype=dtype))
    together = step.decode(fixed_splits(200, 32))
    for row in range(3):
        alone = step.decode(fixed_splits(int(step.lengths[row]), 32), [row])
        assert torch.equal(alone[0], together[row])
    assert step.excess(together, last_only=True) <= 1


@pytest.mark.parametrize("kind", ["grouped", "window"])
def test_how_a_prompt_is_cut_changes_no_bit_of_prefill(kind: str) -> None:
    whole = make_step(StepCase(rows=((0, 90),), layer=layer_of(kind), dtype=torch.bfloat16))
    at_once = whole.prefill()
    for cut in (1, 33, 64):
        whole.starts = np.array([0, cut], np.int32)
        whole.lengths = np.array([cut], np.int32)
        q = whole.q
        whole.q = q[:cut]
        first = whole.prefill()
        whole.q, whole.starts, whole.lengths = q[cut:], np.array([0, 90 - cut], np.int32), np.array([90], np.int32)
        second = whole.prefill()
        whole.q = q
        assert torch.equal(torch.cat((first, second)), at_once)


def test_strided_queries_and_a_given_result() -> None:
    step = make_step(StepCase(rows=((0, 5), (40, 3)), layer=layer_of("grouped")))
    want = step.prefill()
    tokens, heads, dim = step.q.shape
    wide = torch.full((tokens, 2 * heads, dim), float("nan"))
    wide[:, heads:] = step.q
    step.q = wide[:, heads:]
    assert torch.equal(step.prefill(), want)


@pytest.mark.parametrize("kind", ["grouped", "softcap-window", "sinks"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_query_of_nan_gives_nan_and_disturbs_no_other(kind: str) -> None:
    step = make_step(StepCase(rows=((0, 3), (40, 2)), layer=layer_of(kind)))
    runs = (step.prefill, lambda: step.decode(Splits(1)), lambda: step.decode(Splits(2)))
    whole = [run() for run in runs]
    step.q[4] = float("nan")
    broken = [run() for run in runs]
    for before, after in zip(whole, broken, strict=True):
        assert after[-1].isnan().all()
        assert torch.equal(before[:-1], after[:-1])


@pytest.mark.parametrize("page", [1, 2])
def test_keys_and_values_beyond_two_gigabytes_are_read(page: int) -> None:
    """Pages of memory are committed as they are touched, so that most of this pool takes none."""
    heads, dim = 8, 256
    slots = 2**31 // (heads * dim) + 4
    pool = [torch.from_numpy(np.zeros(slots * heads * dim, np.uint8)).view(torch.float8_e5m2) for _ in range(2)]
    keys, values = (part.view(slots, heads, dim) for part in pool)
    slot = slots - 2
    keys[slot], values[slot] = 1.0, 2.0
    kv = PagedKV(keys, values, torch.tensor([[slot // page]], dtype=torch.int32), page)
    q, one, line = torch.ones(1, heads, dim), torch.tensor([1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    rows, tiles = DecodeRows(one, line), torch.tensor([[0, 1, 0, 0]], dtype=torch.int32)
    for got in (
        decode(q, kv, rows, Scoring(0.1), DecodeSplits(Splits(1))),
        prefill(q, kv, tiles, Scoring(0.1)),
    ):
        assert (got == 2).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [PREFILL, MIXED], ids=["prefill", "mixed"])
def test_prefill_over_the_whole_grid(rows, kind: str, dtype: torch.dtype) -> None:
    for page in (1, 16, 64):
        step = make_step(
            StepCase(rows=tuple((row.cached, row.new) for row in rows), layer=layer_of(kind), dtype=dtype, page=page)
        )
        assert step.excess(step.prefill()) <= 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize("kind", KINDS)
def test_decode_over_the_whole_grid(kind: str, dtype: torch.dtype) -> None:
    rows = tuple((row.cached, row.new) for row in DECODE)
    for stored in (dtype, *EIGHT_BITS):
        for page in (1, 16, 64):
            step = make_step(StepCase(rows=rows, layer=layer_of(kind), dtype=dtype, kv_dtype=stored, page=page))
            for splits in (choose_splits(len(rows), 2, 300, 132), Splits(7), fixed_splits(300, 64)):
                assert step.excess(step.decode(splits), last_only=True) <= 1
