"""Keys and values as floats of 8 bits in torch's attention: within half a step, and a fault in the scales is seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cardan.platform import AttentionBackend, DeviceInfo, OpsKVPool  # noqa: E402
from cardan.testing.conformance import CheckError  # noqa: E402
from cardan.testing.conformance.attention_bench import AttentionBench, Case  # noqa: E402
from cardan.testing.conformance.attention_checks import BATCHES, CODED_KINDS, KINDS, SCALED, hold, make_layer  # noqa: E402
from cardan.types import KVLayout, LayerKV  # noqa: E402
from cardan_cpu.device import CpuDevice  # noqa: E402
from cardan_torch import TorchAttention, TorchKVPool  # noqa: E402

FLOAT8 = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}


class Device(CpuDevice):
    """On one thread, with a backend of the test's own."""

    backend: type[TorchAttention] = TorchAttention

    def __init__(self) -> None:
        super().__init__(DeviceInfo(index=0, name="cpu"), threads=1)

    def attention(self, name: str, pool: OpsKVPool, layout: KVLayout, dtype: str) -> AttentionBackend:
        assert isinstance(pool, TorchKVPool)
        return self.backend(pool)


def run(kind: str, batch: str, kv_dtype: str, dtype: str = "float32", backend: type | None = None) -> None:
    layer = make_layer(**(SCALED if kind == "scaled" else KINDS[kind]))
    mode, rows = BATCHES[batch]
    device = Device()
    device.backend = backend or TorchAttention
    sinks = np.linspace(-1.0, 4.0, layer.q_heads) if layer.sinks else None
    case = Case(mode=mode, rows=rows, layer=layer, dtype=dtype, kv_dtype=kv_dtype)
    bench = AttentionBench(device, "torch", case, sinks=sinks)
    got, want = bench.run()
    hold(got, want, bench.allowed, kind)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", CODED_KINDS)
@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_only_half_a_step_of_each_value_is_lost(kind: str, batch: str, kv_dtype: str) -> None:
    run(kind, batch, kv_dtype)


@pytest.mark.parametrize("batch", BATCHES)
def test_activations_may_be_narrow(batch: str) -> None:
    run("scaled", batch, "fp8_e4m3", "bfloat16")


class WritesUnscaled(TorchAttention):
    def forward(self, q, k, v, layer, plan, sinks=None):
        return super().forward(q, k, v, replace(layer, k_scale=1.0, v_scale=1.0), plan, sinks)


class ForgetsKeys(TorchAttention):
    """Reads keys without their scale."""

    def _attend_kept(self, q, layer, plan, sinks):
        return super()._attend_kept(q, replace(layer, scale=layer.scale / layer.k_scale), plan, sinks)


class ForgetsValues(TorchAttention):
    """Reads values without their scale."""

    def forward(self, q, k, v, layer, plan, sinks=None):
        return super().forward(q, k, v, layer, plan, sinks) / layer.v_scale


@pytest.mark.parametrize("kv_dtype", FLOAT8)
@pytest.mark.parametrize("fault", [WritesUnscaled, ForgetsKeys, ForgetsValues])
def test_a_fault_in_the_scales_is_seen(fault: type, kv_dtype: str) -> None:
    with pytest.raises(CheckError, match="times what rounding explains"):
        run("scaled", "decode", kv_dtype, backend=fault)


@pytest.mark.parametrize(("kv_dtype", "largest"), FLOAT8.items())
def test_what_is_too_large_is_cut_and_nan_stays_nan(kv_dtype: str, largest: float) -> None:
    layer = LayerKV(index=0, q_heads=1, kv_heads=1, k_dim=4, v_dim=4, scale=1.0, k_scale=0.5, v_scale=4.0)
    pool = TorchKVPool(KVLayout(layers=(layer,), page_size=1, dtype=kv_dtype), 8, 2, 8, torch.device("cpu"))
    assert pool.num_bytes == 2 * 8 * 4
    new = torch.tensor([[[1e9, -1e9, float("nan"), 0.5 * largest]]])
    slots = torch.tensor([3])
    pool.write(new, new, layer, slots)
    keys, values = pool.gather(layer, slots, torch.float32)
    np.testing.assert_array_equal(keys.flatten(), [largest, -largest, np.nan, largest])
    np.testing.assert_array_equal(values.flatten(), [largest, -largest, np.nan, largest / 8])
    assert float(pool.keys[0].float().abs().nansum()) == 3 * largest
