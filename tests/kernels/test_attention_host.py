"""What attention kernels decide on the host: tiles, parts, configurations, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from cardan.errors import PlatformError, UnsupportedError
from cardan_kernels.attention import (
    AttentionShape,
    DecodeRows,
    DecodeSplits,
    Scoring,
    Splits,
    choose_splits,
    decode,
    fixed_splits,
    head_tiles,
    plan_tiles,
    prefill,
    scratch_size,
    tokens_per_tile,
)
from cardan_kernels.attention import variants as attention_variants
from cardan_kernels.chips import COMPILED_FOR
from cardan_kernels.launching import on_device_of
from cardan_kernels.paged import PagedKV
from cardan_kernels.tuning import choose


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_every_token_is_in_one_tile_and_the_longest_come_first() -> None:
    tiles = plan_tiles(int32(0, 1, 40, 40, 50), int32(7, 39, 5, 300), int32(3, 1, 9, 2), 16)
    tokens = np.concatenate([np.arange(first, first + count) for first, count, _, _ in tiles])
    assert sorted(tokens.tolist()) == list(range(50))
    ends = tiles[:, 1] + tiles[:, 2]
    assert (np.diff(ends) <= 0).all()
    assert tiles.dtype == np.int32
    assert [40, 10, 290, 2] in tiles.tolist()
    assert [0, 1, 6, 3] in tiles.tolist()
    assert {tuple(tile) for tile in tiles.tolist() if tile[3] == 1} == {(1, 16, 0, 1), (17, 16, 16, 1), (33, 7, 32, 1)}
    assert 9 not in tiles[:, 3]


def test_small_batches_are_split_until_the_chip_is_full_and_large_ones_are_not() -> None:
    assert choose_splits(1, 8, 8192, 132) == Splits(32)
    assert choose_splits(8, 8, 8192, 132) == Splits(5)
    assert choose_splits(256, 8, 8192, 132) == Splits(1)
    assert choose_splits(1, 1, 100, 132) == Splits(1)
    assert choose_splits(1, 1, 10**6, 132).count == 128


def test_parts_of_a_fixed_size_always_take_the_second_pass() -> None:
    assert fixed_splits(300, 512) == Splits(1, 512)
    assert fixed_splits(1025, 512) == Splits(3, 512)
    assert scratch_size(2, 4, 8, fixed_splits(300)) == 2 * 4 * 9
    assert scratch_size(2, 4, 8, Splits(1)) == 0
    assert scratch_size(2, 4, 8, Splits(3)) == 2 * 4 * 3 * 9


@pytest.mark.parametrize("chip", COMPILED_FOR)
def test_every_chip_has_configurations_for_every_shape(chip: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for dim in (64, 80, 96, 128, 256):
            shape = AttentionShape(32, 8, dim, dim, dtype, dtype)
            block_m = choose("attention_prefill", chip, {"head": dim, "bits": 8 * dtype.itemsize, "kv_bits": 16})[
                "block_m"
            ]
            assert tokens_per_tile(shape, chip) >= 1
            assert block_m >= 16
            assert head_tiles(shape, chip) == 8
            splits = fixed_splits(4096)
            assert splits.tokens is not None
            assert (
                splits.tokens % choose("attention_decode", chip, {"head": dim, "bits": 16, "kv_bits": 8})["block_n"]
                == 0
            )


def test_variants_have_names_of_their_own() -> None:
    names = [variant.name for variant in attention_variants.variants("sm_90")]
    assert len(names) == len(set(names))


def one_row(**changes: object) -> tuple[torch.Tensor, PagedKV]:
    pool = torch.zeros(4, 1, 16)
    return torch.zeros(1, 2, 16), PagedKV(
        **{"keys": pool, "values": pool, "table": torch.zeros((1, 4), dtype=torch.int32), **changes}
    )  # type: ignore[arg-type]


def try_decode(splits: Splits, scratch: torch.Tensor | None) -> torch.Tensor:
    q, kv = one_row()
    rows = DecodeRows(torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    return decode(q, kv, rows, Scoring(1.0), DecodeSplits(splits, scratch))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "page": (lambda: one_row(page_size=48), "must be a power of two, got 48"),
    "strides": (lambda: one_row(keys=torch.zeros(4, 1, 32)[:, :, ::2]), "contiguous in their last axis"),
    "scale": (lambda: Scoring(0.0), "scale of attention must be above 0, got 0.0"),
    "window": (lambda: Scoring(1.0, window=0), "window of attention must be above 0, got 0"),
    "softcap": (lambda: Scoring(1.0, softcap=-1.0), "softcap of attention must be above 0"),
    "heads": (
        lambda: AttentionShape(7, 2, 16, 16, torch.float32, torch.float32),
        "a multiple of key heads, got 7 and 2",
    ),
    "wide": (lambda: AttentionShape(2, 2, 16, 320, torch.float32, torch.float32), "not be wider than 256"),
    "queries": (
        lambda: prefill(torch.zeros(1, 2, 8), one_row()[1], torch.zeros((1, 4), dtype=torch.int32), Scoring(1.0)),
        "16 wide as keys are",
    ),
    "scratch": (lambda: try_decode(Splits(3), torch.zeros(10)), "must have 102 elements for 1 rows in 3 parts, got 10"),
    "no scratch": (lambda: try_decode(Splits(3), None), "got 0. Allocate what scratch_size says"),
    "parts": (lambda: try_decode(Splits(3, 100), torch.zeros(200)), "whole blocks of 32 keys, got 100"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_kernels_do_not_take_is_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(UnsupportedError, match=message):
        call()


def test_compiled_kernels_refuse_tensors_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cardan_kernels.launching.interpreted", lambda: False)
    with pytest.raises(PlatformError, match="got one in host memory"):
        on_device_of(torch.zeros(1))


def test_nothing_to_do_is_no_launch() -> None:
    q, kv = one_row()
    assert prefill(q[:0], kv, torch.zeros((0, 4), dtype=torch.int32), Scoring(1.0)).shape == (0, 32)
    empty = DecodeRows(torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    assert decode(q[:0], kv, empty, Scoring(1.0), DecodeSplits(Splits(1))).shape == (0, 32)
