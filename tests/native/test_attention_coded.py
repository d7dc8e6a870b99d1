"""Keys and values of 8 bits: what is written, what is read, and that a fault in the scales is seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

native_kernels = pytest.importorskip("cardan_native")

from native_bench import BenchDevice, layer_kv, tensor  # noqa: E402

from cardan.testing.conformance import CheckError  # noqa: E402
from cardan.testing.conformance.attention_bench import AttentionBench, Case, Row  # noqa: E402
from cardan.testing.conformance.attention_checks import BATCHES, hold  # noqa: E402
from cardan.types import ForwardMode, KVLayout, LayerKV  # noqa: E402
from cardan_cpu.native_attention import NativeAttention  # noqa: E402
from cardan_cpu.native_kv_pool import NativeKVPool  # noqa: E402

VARIANTS = native_kernels.available()
FRACTION_BITS = {"fp8_e4m3": 3, "fp8_e5m2": 2}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
KINDS: dict[str, dict[str, object]] = {
    "grouped": {},
    "heads-of-64": {"q_heads": 9, "kv_heads": 3, "k_dim": 64, "v_dim": 64, "scale": 0.125},
    "odd-heads": {"q_heads": 4, "kv_heads": 2, "k_dim": 13, "v_dim": 7},
    "softcap-window": {"softcap": 2.0, "window": 50},
    "sinks": {"sinks": True},
}
CASCADE = (Row(700, 1), *(Row(600 + extra, 1, shares=0, shared=600) for extra in (0, 3, 170, 400)))


def values_of_codes(dtype: str) -> np.ndarray:
    """The value of each of the 256 codes; NaN and infinity stand as NaN. Source: OFP8, tables 1 and 2."""
    bits = FRACTION_BITS[dtype]
    bias = {3: 7, 2: 15}[bits]
    codes = np.arange(256)
    exponent, fraction = (codes & 0x7F) >> bits, codes & ((1 << bits) - 1)
    sizes = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias - bits), (1 + fraction / 2**bits) * 2.0 ** (exponent - bias)
    )
    sizes = np.where(sizes > LARGEST[dtype], np.nan, sizes)
    return np.where(codes & 0x80, -sizes, sizes)


def make_pool(variant: str, dtype: str, **changes: object) -> NativeKVPool:
    layout = KVLayout(layers=(layer_kv(**changes),), page_size=1, dtype=dtype)
    return NativeKVPool(native_kernels.load(variant), layout, 64, 2, 64)


def write(pool: NativeKVPool, k: np.ndarray, layer: LayerKV | None = None) -> None:
    """Rows to the slots from 1 on."""
    native = pool.native
    slots = tensor(native, np.arange(1, 1 + len(k))[None], "int32")
    x = tensor(native, k)
    native.write_kv(x, x, pool.keys[0], pool.values[0], slots, 0, **pool.scales(layer or layer_kv()))


def run(variant: str, kind: str, batch: str | None, kv_dtype: str, backend: type = NativeAttention) -> None:
    layer = layer_kv(**KINDS[kind])
    mode, rows = (ForwardMode.DECODE, CASCADE) if batch is None else BATCHES[batch]
    case = Case(mode=mode, rows=rows, layer=layer, dtype="float32", kv_dtype=kv_dtype)
    sinks = np.linspace(-1.0, 4.0, layer.q_heads) if layer.sinks else None
    device = CodedDevice(native_kernels.load(variant), backend)
    bench = AttentionBench(device, "native", case, sinks=sinks)  # type: ignore[arg-type]
    got, want = bench.run()
    hold(got, want, bench.allowed, kind)


@dataclass
class CodedDevice(BenchDevice):
    """A bench over some backend."""

    backend: type = NativeAttention

    def attention(self, name: str, pool: NativeKVPool, layout: KVLayout, dtype: str) -> NativeAttention:
        made: NativeAttention = self.backend(pool)
        return made


# --- attention ---


@pytest.mark.parametrize("batch", [*BATCHES, None])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_dtype", ["int8", *FRACTION_BITS])
@pytest.mark.parametrize("variant", VARIANTS)
def test_only_half_a_step_of_each_value_is_lost(variant: str, kv_dtype: str, kind: str, batch: str | None) -> None:
    run(variant, kind, batch, kv_dtype)


class OtherHeadsScale(NativeAttention):
    """Reads each head's codes with the scale of another."""

    leaf = "key_scales"

    def forward(self, q, k, v, layer, plan, sinks=None):
        pool = self.pool
        pool.native.write_kv(
            k, v, pool.keys[layer.index], pool.values[layer.index], plan.out_slots, layer.group, **pool.scales(layer)
        )
        scales = pool.scales(layer)
        kept = np.array(scales[self.leaf].bits())
        scales[self.leaf] = tensor(pool.native, self.spoilt(kept))
        rows, window, softcap = plan.groups[layer.group], layer.window or 0, layer.softcap or 0.0
        keys, values = pool.keys[layer.index], pool.values[layer.index]
        return pool.native.attention(q, keys, values, rows, layer.scale, window, softcap, sinks, **scales)

    def spoilt(self, scales: np.ndarray) -> np.ndarray:
        return np.roll(scales, 1, axis=1)


class OtherHeadsValueScale(OtherHeadsScale):
    leaf = "value_scales"


class LargeScale(OtherHeadsScale):
    """Scales a quarter too large."""

    def spoilt(self, scales: np.ndarray) -> np.ndarray:
        return scales * np.float32(1.25)


class LargeValueScale(LargeScale):
    leaf = "value_scales"


class LateScale(OtherHeadsScale):
    """Each slot's scale is that of the slot before."""

    def spoilt(self, scales: np.ndarray) -> np.ndarray:
        return np.roll(scales, 1, axis=0)


@pytest.mark.parametrize("batch", ["decode", "prefill"])
@pytest.mark.parametrize("fault", [OtherHeadsScale, OtherHeadsValueScale, LargeScale, LargeValueScale, LateScale])
def test_a_fault_in_the_scales_is_seen(fault: type, batch: str) -> None:
    with pytest.raises(CheckError, match="times what rounding explains"):
        run(VARIANTS[-1], "grouped", batch, "int8", fault)


@pytest.mark.parametrize("kv_dtype", FRACTION_BITS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layers_scale_goes_in_and_comes_out(variant: str, kv_dtype: str) -> None:
    """Keys of thousands and values of millionths are kept as well as others once they are divided."""
    k_scale, v_scale = 256.0, 2.0**-12
    scaled = {"k_scale": k_scale, "v_scale": v_scale, "scale": 0.25 / k_scale}
    results = []
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((1, 6, 16)), rng.standard_normal((30, 2, 16)), rng.standard_normal((30, 2, 16))
    for changes, factors in (({}, (1.0, 1.0)), (scaled, (k_scale, v_scale))):
        layer = layer_kv(**changes)
        pool = make_pool(variant, kv_dtype)
        native, backend = pool.native, NativeAttention(pool)
        pool.tables.bits()[0, 1, :30] = np.arange(1, 31)
        slots = tensor(native, np.arange(1, 31)[None], "int32")
        keys, values = tensor(native, k * factors[0]), tensor(native, v * factors[1])
        native.write_kv(keys, values, pool.keys[0], pool.values[0], slots, 0, **pool.scales(layer))
        plan = backend.fixed_plan(1)
        plan.row_ids.bits()[:] = 1
        plan.seq_lens.bits()[:] = 30
        out = native.attention(
            tensor(native, q), pool.keys[0], pool.values[0], plan.groups[0], layer.scale, **pool.scales(layer)
        )
        results.append(np.array(out.bits()) / factors[1])
    np.testing.assert_array_equal(*results)  # all factors are powers of two


# --- what is written ---


@pytest.mark.parametrize("variant", VARIANTS)
def test_codes_of_int8_reach_127_for_the_largest_of_a_head(variant: str) -> None:
    pool = make_pool(variant, "int8", k_dim=13, v_dim=13)
    k = np.float32(np.random.default_rng(0).standard_normal((9, 2, 13)) * np.logspace(-6, 6, 9)[:, None, None])
    k[3, 1] = 0
    write(pool, k)
    largest = np.abs(k).max(-1)
    for leaf, scales in ((pool.keys[0], pool.key_scales[0]), (pool.values[0], pool.value_scales[0])):
        np.testing.assert_array_equal(np.array(scales.bits())[1:10], largest / np.float32(127))
        codes = np.array(leaf.bits())[1:10].astype(np.float64)
        exact = 127 * k.astype(np.float64) / np.where(largest == 0, 1, largest)[..., None]
        assert np.abs(codes - exact).max() <= 0.5 + 127 * 2.0**-22
        assert (np.abs(codes).max(-1) == np.where(largest == 0, 0, 127)).all()
    assert not np.array(pool.keys[0].bits())[10:].any()


@pytest.mark.parametrize("kv_dtype", FRACTION_BITS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_floats_of_8_bits_are_the_nearest_and_even_of_two(variant: str, kv_dtype: str) -> None:
    table = values_of_codes(kv_dtype)
    finite = np.unique(table[np.isfinite(table)])
    middles = (finite[1:] + finite[:-1]) / 2
    tries = np.concatenate([finite, middles, np.nextafter(np.float32(middles), np.float32(np.inf)), middles * 1.01])
    tries = (
        np.float32(np.resize(tries, (33, 2, 16))) if tries.size < 1056 else np.float32(tries[:1056].reshape(33, 2, 16))
    )
    pool = make_pool(variant, kv_dtype)
    write(pool, tries)
    codes = np.array(pool.keys[0].bits())[1:34]
    off = np.abs(tries.astype(np.float64)[..., None] - table)
    off[..., np.isnan(table)] = np.inf
    least = off.min(-1)
    np.testing.assert_array_equal(np.take_along_axis(off, codes[..., None].astype(int), -1)[..., 0], least)
    tied = ((off == least[..., None]) & (table != 0)).sum(-1) > 1
    assert not (codes & 1)[tied].any()


@pytest.mark.parametrize("kv_dtype", FRACTION_BITS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_code_is_read_as_its_value(variant: str, kv_dtype: str) -> None:
    """One key takes the whole share, so that the result is the value."""
    table = values_of_codes(kv_dtype)
    pool = make_pool(variant, kv_dtype)
    pool.values[0].bits()[1:9] = np.arange(256, dtype=np.uint8).reshape(8, 2, 16)
    backend = NativeAttention(pool)
    plan = backend.fixed_plan(8)
    plan.row_ids.bits()[:] = 1
    pool.tables.bits()[0, 1, 0] = 1
    q = tensor(pool.native, np.zeros((1, 6, 16)))
    for slot in range(1, 9):
        pool.tables.bits()[0, 1, 0] = slot
        one = backend.fixed_plan(1)
        one.row_ids.bits()[:] = 1
        one.seq_lens.bits()[:] = 1
        out = np.array(pool.native.attention(q, pool.keys[0], pool.values[0], one.groups[0], 1.0).bits())
        want = np.repeat(table.reshape(8, 2, 16)[slot - 1], 3, axis=0)
        there = np.isfinite(want)
        np.testing.assert_array_equal(out.reshape(6, 16)[there], np.float32(want)[there])


@pytest.mark.parametrize("kv_dtype", ["int8", *FRACTION_BITS])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_too_large_saturates_and_nan_stays_out(variant: str, kv_dtype: str) -> None:
    pool = make_pool(variant, kv_dtype)
    k = np.ones((4, 2, 16), np.float32)
    k[0, 0, :3] = np.inf, -np.inf, np.nan
    k[1, 0, :2] = 3e38, -3e38
    k[2, 0] = np.nan
    write(pool, k)
    codes = np.array(pool.keys[0].bits())[1:5]
    if kv_dtype == "int8":
        scales = np.array(pool.key_scales[0].bits())[1:5]
        assert np.isfinite(scales).all()
        assert codes[0, 0, :4].tolist() == [127, -127, 0, 0]
        assert codes[1, 0, :3].tolist() == [127, -127, 0]
        assert not codes[2, 0].any()
        assert (codes[2, 1] == 127).all()
        return
    values = values_of_codes(kv_dtype)[codes]
    most = LARGEST[kv_dtype]
    assert values[0, 0, :4].tolist() == [most, -most, 0, 1]
    assert values[1, 0, :3].tolist() == [most, -most, 1]
    assert not values[2, 0].any()
    assert np.isfinite(values).all()


def test_scales_that_do_not_fit_are_refused() -> None:
    pool, floats = make_pool(VARIANTS[-1], "int8"), make_pool(VARIANTS[-1], "fp8_e4m3")
    native = pool.native
    x, slots = tensor(native, np.zeros((1, 2, 16))), tensor(native, np.zeros((1, 1)), "int32")
    keys, values, scales = pool.keys[0], pool.values[0], pool.key_scales[0]

    def refused(pattern: str, *args: object, **named: object) -> None:
        with pytest.raises(ValueError, match=pattern):
            native.write_kv(*args, **named)

    refused("key_scales and value_scales must be given for int8.*got keys of int8", x, x, keys, values, slots, 0)
    refused("must be given for int8", x, x, keys, values, slots, 0, key_scales=scales)
    few = tensor(native, np.zeros((64, 1)))
    refused("scales must be", x, x, keys, values, slots, 0, key_scales=few, value_scales=few)
    eight = (floats.keys[0], floats.values[0])
    refused("for no other type", x, x, *eight, slots, 0, key_scales=scales, value_scales=scales)
    refused("key_scale and value_scale must be above 0", x, x, *eight, slots, 0, key_scale=0.0)
    both = {"key_scales": scales, "value_scales": scales}
    refused("and 1 but for fp8, got 2", x, x, keys, values, slots, 0, key_scale=2.0, **both)


# --- bytes ---


@pytest.mark.parametrize(
    ("kv_dtype", "bytes_of_a_slot"), [("int8", 2 * (16 + 16 + 8)), ("fp8_e4m3", 64), ("bfloat16", 128)]
)
def test_scales_count_as_bytes_of_a_slot(kv_dtype: str, bytes_of_a_slot: int) -> None:
    layout = KVLayout(layers=(layer_kv(),), page_size=1, dtype=kv_dtype)
    assert layout.bytes_per_slot == bytes_of_a_slot
    pool = make_pool(VARIANTS[-1], kv_dtype)
    assert pool.num_bytes == 64 * bytes_of_a_slot
    leaves = pool.leaves()
    pool.bind(leaves)
    assert pool.leaves() == leaves
