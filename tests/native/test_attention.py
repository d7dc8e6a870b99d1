"""Native attention against dense attention in float64, over scattered slots among slots that hold NaN."""

from __future__ import annotations

import numpy as np
import pytest

native_kernels = pytest.importorskip("cardan_native")

from dense_attention import dense_attention  # noqa: E402
from native_bench import BenchDevice, Stage, from_bits, layer_kv, tensor  # noqa: E402

from cardan.testing.conformance.attention_bench import AttentionBench, Case, Row  # noqa: E402
from cardan.testing.conformance.attention_checks import hold  # noqa: E402
from cardan.types import ForwardMode, KVKind, LayerKV  # noqa: E402

VARIANTS = native_kernels.available()
TOLERANCE = {"float32": 4e-6, "bfloat16": 1.2e-2, "float16": 2e-3}
"""Largest error over a token's largest value: the rounding of the result, or of a few hundred float32 sums."""

DECODE = tuple(Row(length - 1, 1) for length in (1, 2, 17, 64, 300, 256, 257, 512, 513, 65))
PREFILL = (Row(0, 1), Row(0, 33), Row(100, 20), Row(63, 65), Row(0, 130), Row(255, 2), Row(200, 300))
DRAFTS = (Row(250, 4), Row(254, 5), Row(255, 2), Row(0, 3), Row(511, 5), Row(600, 2))
MIXED = (Row(0, 40), Row(55, 1), Row(64, 64), Row(300, 1), Row(1, 1), Row(700, 3))
BATCHES = {
    "decode": (ForwardMode.DECODE, DECODE),
    "prefill": (ForwardMode.EXTEND, PREFILL),
    "drafts": (ForwardMode.EXTEND, DRAFTS),
    "mixed": (ForwardMode.MIXED, MIXED),
}
KINDS: dict[str, dict[str, object]] = {
    "grouped": {},
    "one-to-one": {"q_heads": 3, "kv_heads": 3},
    "five-to-one": {"q_heads": 5, "kv_heads": 1, "k_dim": 8, "v_dim": 8},
    "many-to-one": {"q_heads": 24, "kv_heads": 1},
    "heads-of-64": {"q_heads": 9, "kv_heads": 3, "k_dim": 64, "v_dim": 64, "scale": 0.125},
    "heads-of-80": {"q_heads": 2, "kv_heads": 1, "k_dim": 80, "v_dim": 80, "scale": 0.11},
    "heads-of-96": {"q_heads": 4, "kv_heads": 1, "k_dim": 96, "v_dim": 96, "scale": 0.1},
    "heads-of-128": {"q_heads": 4, "kv_heads": 2, "k_dim": 128, "v_dim": 128, "scale": 0.09},
    "heads-of-256": {"q_heads": 2, "kv_heads": 1, "k_dim": 256, "v_dim": 256, "scale": 0.0625},
    "odd-heads": {"q_heads": 4, "kv_heads": 2, "k_dim": 13, "v_dim": 7},
    "tiny-heads": {"q_heads": 2, "kv_heads": 2, "k_dim": 1, "v_dim": 3},
    "wide-values": {"k_dim": 8, "v_dim": 24},
    "window": {"window": 37, "kind": KVKind.SLIDING},
    "window-of-one": {"window": 1, "kind": KVKind.SLIDING},
    "window-across-splits": {"window": 290, "kind": KVKind.SLIDING},
    "softcap": {"softcap": 2.0},
    "softcap-window": {"softcap": 2.0, "window": 50, "kind": KVKind.SLIDING},
    "sinks": {"sinks": True},
    "sinks-window": {"sinks": True, "window": 20, "kind": KVKind.SLIDING},
}


def error(mode: ForwardMode, rows: tuple[Row, ...], layer: LayerKV, variant: str, **changes: object) -> float:
    settings: dict[str, object] = {"dtype": "float32", "kv_dtype": "float32", **changes}
    case = Case(mode=mode, rows=rows, layer=layer, **settings)  # type: ignore[arg-type]
    sinks = np.linspace(-1.0, 4.0, layer.q_heads) if layer.sinks else None
    device = BenchDevice(native_kernels.load(variant))
    got, want = AttentionBench(device, "native", case, sinks=sinks).run()  # type: ignore[arg-type]
    assert not np.isnan(got).any()
    return float((np.abs(got - want).max(-1) / np.abs(want).max(-1)).max())


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_dense_attention(variant: str, kind: str, batch: str) -> None:
    layer = layer_kv(**KINDS[kind])
    assert error(*BATCHES[batch], layer, variant) < TOLERANCE["float32"]


@pytest.mark.parametrize("kv_dtype", TOLERANCE)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("variant", VARIANTS)
def test_narrow_types_lose_their_rounding_only(variant: str, dtype: str, kv_dtype: str) -> None:
    tolerance = max(TOLERANCE[dtype], TOLERANCE[kv_dtype] if kv_dtype != dtype else 0.0)
    for batch in ("decode", "mixed"):
        for kind in ("heads-of-64", "softcap-window", "odd-heads"):
            layer = layer_kv(**KINDS[kind])
            assert error(*BATCHES[batch], layer, variant, dtype=dtype, kv_dtype=kv_dtype) < tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_tiles_of_bfloat16_are_off_by_their_roundings_only(variant: str, kind: str) -> None:
    """Products of pairs or tiles round weights of keys, and nothing else that float32 sums do not."""
    layer = layer_kv(**KINDS[kind])
    mode, rows = BATCHES["prefill"]
    case = Case(mode=mode, rows=rows, layer=layer, dtype="bfloat16", kv_dtype="bfloat16")
    sinks = np.linspace(-1.0, 4.0, layer.q_heads) if layer.sinks else None
    bench = AttentionBench(BenchDevice(native_kernels.load(variant)), "native", case, sinks=sinks)  # type: ignore[arg-type]
    got, want = bench.run()
    hold(got, want, bench.allowed, kind)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_pages_and_the_form_of_table_changes_do_not_matter(variant: str, page: int, flat: bool) -> None:
    assert error(*BATCHES["mixed"], layer_kv(), variant, page=page, flat=flat) < TOLERANCE["float32"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_long_sequences(variant: str) -> None:
    layer = layer_kv(q_heads=4, kv_heads=2)
    decode = tuple(Row(n - 1, 1) for n in (1, 63, 1025, 2047, 4096))
    assert error(ForwardMode.DECODE, decode, layer, variant) < TOLERANCE["float32"]
    prefill = (Row(0, 1024), Row(3996, 100), Row(2048, 65))
    assert error(ForwardMode.EXTEND, prefill, layer, variant) < TOLERANCE["float32"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_of_32768_tokens(variant: str) -> None:
    stage = Stage(native_kernels.load(variant), layer_kv(), slots=40000, longest=32768)
    stage.add(3, 32768)
    q = stage.queries(1)
    (got,) = stage.attend([(3, q, 32768)])
    want = dense_attention(q, stage.keys[3], stage.values[3], stage.layer)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_shared_prefix_is_read_once_and_right(variant: str) -> None:
    rows = (Row(700, 1), *(Row(600 + extra, 1, shares=0, shared=600) for extra in (0, 3, 170, 400)))
    rows += tuple(Row(520 + 30 * i, 1, shares=3, shared=520) for i in range(20))
    for kind in ("grouped", "five-to-one", "window", "sinks"):
        assert error(ForwardMode.DECODE, rows, layer_kv(**KINDS[kind]), variant) < TOLERANCE["float32"]
    rows = (Row(600, 5), Row(602, 30, shares=0, shared=600), Row(600, 4, shares=0, shared=600))
    assert error(ForwardMode.EXTEND, rows, layer_kv(), variant) < TOLERANCE["float32"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_large_scores_do_not_overflow(variant: str) -> None:
    stage = Stage(native_kernels.load(variant), layer_kv(scale=100.0))
    for line, (length, count) in enumerate([(400, 1), (300, 40)], start=1):
        stage.add(line, length)
        q = stage.queries(count)
        (got,) = stage.attend([(line, q, length)])
        want = dense_attention(q, stage.keys[line], stage.values[line], stage.layer)
        assert np.abs(got - want).max() < 1e-3  # float32 scores of hundreds are off by 1e-4, which e to them magnifies


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_empty_batch_gives_nothing(variant: str) -> None:
    stage = Stage(native_kernels.load(variant), layer_kv())
    assert stage.attend([]) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_that_only_fill_up_give_zeros(variant: str) -> None:
    stage = Stage(native_kernels.load(variant), layer_kv())
    stage.add(2, 30)
    q = stage.queries(1)
    alone = stage.attend([(2, q, 30)])[0]
    first, real, last, outside = stage.attend([(0, q, 0), (2, q, 30), (1, stage.queries(20), 0), (999, q, 30)])
    assert not first.any()
    assert not last.any()
    assert not outside.any()
    np.testing.assert_array_equal(real, alone)


@pytest.mark.parametrize("variant", VARIANTS)
def test_queries_may_be_a_part_of_wider_rows(variant: str) -> None:
    native = native_kernels.load(variant)
    stage = Stage(native, layer_kv())
    stage.add(1, 50)
    q = stage.queries(1)
    wide = np.concatenate([np.full((1, 5), np.nan), q.reshape(1, -1), np.full((1, 40), np.nan)], axis=1)
    part = tensor(native, wide).columns(5, 6 * 16).split_heads(6)
    plan = stage.backend.fixed_plan(1)
    plan.row_ids.bits()[:] = 1
    plan.seq_lens.bits()[:] = 50
    out = native.attention(part, stage.pool.keys[0], stage.pool.values[0], plan.groups[0], stage.layer.scale)
    np.testing.assert_array_equal(np.array(out.bits()), stage.attend([(1, q, 50)])[0])


def test_what_does_not_fit_is_refused() -> None:
    native = native_kernels.load()
    stage = Stage(native, layer_kv())
    keys, values, plan = stage.pool.keys[0], stage.pool.values[0], stage.backend.fixed_plan(1)
    q = tensor(native, np.zeros((1, 6, 16)))

    def refused(pattern: str, *args: object, **named: object) -> None:
        with pytest.raises(ValueError, match=pattern):
            native.attention(*args, **named)

    rows = plan.groups[0]
    refused("keys must be", tensor(native, np.zeros((1, 6, 8))), keys, values, rows, 1.0)
    refused("multiple of 2 heads", tensor(native, np.zeros((1, 5, 16))), keys, values, rows, 1.0)
    refused("q must be of 3 axes", tensor(native, np.zeros((1, 96))), keys, values, rows, 1.0)
    refused("sinks must be", q, keys, values, rows, 1.0, sinks=tensor(native, np.zeros(5)))
    refused("window and softcap", q, keys, values, rows, 1.0, window=-1)
    two, three = (tensor(native, np.zeros(size), "int32") for size in (2, 3))
    one = tensor(native, np.zeros(1), "int32")
    refused("group must be below 1", q, keys, values, native.AttentionRows(stage.pool.tables, 1, one, two, one), 1.0)
    refused("query_starts must be", q, keys, values, native.AttentionRows(stage.pool.tables, 0, one, three, one), 1.0)


def test_bits_of_the_bench_are_right() -> None:
    native = native_kernels.load()
    values = np.array([1.0, -2.5, 3.1415927, np.inf, 1e-3])
    for dtype in TOLERANCE:
        x = tensor(native, values, dtype)
        np.testing.assert_allclose(from_bits(np.array(x.bits()), dtype), values, rtol=8e-3)
