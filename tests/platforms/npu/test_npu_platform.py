"""The NPU platform's answers: tiers of memory, the page, layers left to torch, options, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cardan.errors import ConfigError, MemoryPlanError, UnsupportedError
from cardan.platform import DeviceInfo, Evidence, Feature, Memory, MemoryRequest, ModelFacts, Support
from cardan.types import LayerKV
from cardan_npu import platform
from cardan_npu.limits import why_not_fused
from cardan_npu.memory import NPU_MEMORY
from cardan_torch.own_memory import OwnMemoryPolicy

GIB = 2**30


def layer(**changes) -> LayerKV:
    sizes = {"index": 0, "q_heads": 8, "kv_heads": 2, "k_dim": 128, "v_dim": 128, "scale": 0.1}
    return LayerKV(**{**sizes, **changes})


def facts(*layers: LayerKV, native_dtype: str = "bfloat16") -> ModelFacts:
    return ModelFacts(
        name="m", architecture="A", family="a", num_layers=len(layers), hidden_size=64, intermediate_size=64,
        vocab_size=64, context_length=4096, layers=layers, num_parameters=1, weight_bytes=1, weight_formats={},
        native_dtype=native_dtype,
    )  # fmt: skip


def info(gib: int) -> DeviceInfo:
    return DeviceInfo(index=0, name="NPU", total_memory=gib * GIB)


@pytest.mark.parametrize(("gib", "chunk", "rows", "graph_rows"), [(32, 4096, 128, 16), (64, 8192, 256, 64)])
def test_cards_of_32_and_64_gb_have_sizes_of_their_own(gib, chunk, rows, graph_rows):
    given = platform.recommend(facts(layer()), info(gib))
    assert given["chunked_prefill_size"].value == chunk
    assert given["max_running_requests"].value == rows
    assert given["chunked_prefill_size"].why.startswith(f"fills an NPU with {gib} GiB of memory")
    assert NPU_MEMORY.tier(gib * GIB - 1).top_bucket in (16, graph_rows)
    assert NPU_MEMORY.tier(gib * GIB).top_bucket == graph_rows


def test_pages_are_of_128_tokens_and_types_of_16_bits():
    given = platform.recommend(facts(layer(), native_dtype="float32"), info(64))
    assert (given["page_size"].value, given["dtype"].value) == (128, "bfloat16")
    assert "prefixes are shared in steps of 128" in given["page_size"].why
    assert platform.recommend(facts(layer(), native_dtype="float16"), info(64))["dtype"].value == "float16"
    assert platform.capabilities(info(64)).page_sizes == (128,)


def test_the_plan_counts_layers_that_go_by_torch():
    whole = platform.recommend(facts(layer()), info(64))["attention_backend"]
    assert whole.why == "npu_fused_infer_attention_score takes every layer"
    some = platform.recommend(facts(layer(), layer(index=1, softcap=50.0), layer(index=2, sinks=True)), info(64))
    assert some["attention_backend"].value == "fused"
    assert "1 layers by torch's operators, since the call has no soft-cap" in some["attention_backend"].why
    assert "1 layers by torch's operators, since the call has no sinks" in some["attention_backend"].why


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"k_dim": 96 + 8, "v_dim": 104}, "no multiple of 16"),
        ({"k_dim": 288, "v_dim": 288}, "exceed 256"),
        ({"k_dim": 192, "v_dim": 128}, "differ"),
        ({"q_heads": 128, "kv_heads": 1}, "more than 64 heads"),
        ({"kv_heads": 256, "q_heads": 256, "k_dim": 256, "v_dim": 256}, "exceed 65535"),
        ({"kv_heads": 257, "q_heads": 257, "k_dim": 16, "v_dim": 16}, "more than 256 heads"),
    ],
)
def test_limits_of_the_fused_call_are_named(changes, said):
    why = why_not_fused(layer(**changes), "float16", "float16")
    assert why is not None
    assert said in why


def test_other_limits_of_the_fused_call():
    assert why_not_fused(layer(), "float16", "float16") is None
    assert "keys are float16 and queries bfloat16" in str(why_not_fused(layer(), "float16", "bfloat16"))
    assert "float32 is no type" in str(why_not_fused(layer(), "float32", "float32"))


def test_every_answer_is_from_the_simulator():
    capabilities = platform.capabilities(info(64))
    assert {answer.evidence for answer in capabilities.features.values()} == {Evidence.SIMULATOR}
    assert "Nothing here has been run on an NPU" in capabilities.notes[0]
    assert capabilities.get(Feature.TENSOR_PARALLEL).support is Support.UNSUPPORTED
    assert "HCCL" in capabilities.get(Feature.TENSOR_PARALLEL).reason


@pytest.mark.parametrize("rows", [-1, 257])
def test_the_cap_on_captured_rows_is_checked(rows):
    with pytest.raises(ConfigError, match=f"graph_max_rows must be 0 .* got {rows}"):
        platform.configured({"graph_max_rows": rows})


def test_opening_without_an_npu_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("cardan_npu.install._package_folder", lambda: None)
    with pytest.raises(ConfigError, match=r"torch_npu is not installed.*Pass --platform cpu"):
        platform.open(info(64), {})


def request(**changes) -> MemoryRequest:
    sizes = {
        "memory": Memory(total=64 * GIB, free=48 * GIB), "weight_bytes": 14 * GIB, "activation_bytes": GIB,
        "graph_bytes": 0, "bytes_per_slot": 1 << 17, "page_size": 128, "min_slots": 256, "useful_slots": 1 << 30,
    }  # fmt: skip
    return MemoryRequest(**{**sizes, **changes})


def test_all_memory_but_head_room_by_size_goes_to_the_pool():
    planned = OwnMemoryPolicy(NPU_MEMORY, 11).plan(request())
    lines = {what: (size, why) for what, size, why in planned.lines}
    assert lines["head-room"][0] == 3 * GIB
    assert "by the size of the memory" in lines["head-room"][1]
    assert lines["graphs"] == (
        11 * NPU_MEMORY.graph_bytes + GIB // 4,
        "captured steps of up to 11 sizes, which share memory",
    )
    assert planned.pool_bytes > 48 * GIB - GIB - GIB // 4 - 3 * GIB - 11 * NPU_MEMORY.graph_bytes - (128 << 17) * 2
    smaller = OwnMemoryPolicy(NPU_MEMORY, 5).plan(request(memory=Memory(total=32 * GIB, free=16 * GIB)))
    assert {what: size for what, size, _ in smaller.lines}["head-room"] == 3 * GIB // 2


def test_what_does_not_fit_is_an_error_that_names_the_cap():
    with pytest.raises(MemoryPlanError, match="graph_max_rows"):
        OwnMemoryPolicy(NPU_MEMORY, 11).plan(request(memory=Memory(total=64 * GIB, free=2 * GIB)))
    assert not OwnMemoryPolicy(NPU_MEMORY, 11).under_pressure(Memory(total=64 * GIB, free=0))


def test_no_graphs_reserve_nothing():
    assert OwnMemoryPolicy(NPU_MEMORY, 0).graph_bytes(GIB) == 0


def test_the_device_refuses_other_backends_and_measures_its_memory(device):
    from cardan.types import KVLayout

    layout = KVLayout(layers=(layer(k_dim=16, v_dim=16),), page_size=128, dtype="float16")
    pool = device.allocate_kv(layout, 256, 2, 128)
    with pytest.raises(UnsupportedError, match=r"must be one of fused, torch .* got 'flash'"):
        device.attention("flash", pool, layout, "float16")
    found = device.memory()
    assert found.total == 4 * GIB
    assert found.free is not None
    assert found.free <= found.total - pool.num_bytes
    assert replace(found, free=0).free == 0


def test_a_pool_that_the_fused_call_does_not_take_is_refused(device, monkeypatch):
    from cardan.types import KVLayout
    from cardan_npu import attention

    layout = KVLayout(layers=(layer(k_dim=16, v_dim=16),), page_size=128, dtype="float16")
    pool = device.allocate_kv(layout, 4 * 128, 2, 128)
    monkeypatch.setattr(attention, "MOST_ELEMENTS", 4 * 128 * 32)
    device.attention("fused", pool, layout, "float16")
    monkeypatch.setattr(attention, "MOST_ELEMENTS", 4 * 128 * 32 - 1)
    with pytest.raises(UnsupportedError, match=r"pool of 384 tokens has 16384 .* at most 16383\. Pass .*tokens 256 "):
        device.attention("fused", pool, layout, "float16")
    device.attention("torch", pool, layout, "float16")


def test_keys_of_another_type_than_queries_go_by_torch_and_that_is_said_once(torch_npu, caplog):
    from cardan.types import KVLayout

    opened = platform.open(platform.devices()[0], {})
    layout = KVLayout(layers=(layer(k_dim=16, v_dim=16),), page_size=128, dtype="float16")
    pool = opened.allocate_kv(layout, 256, 2, 128)
    opened.attention("torch", pool, layout, "bfloat16")
    assert not caplog.records
    for _ in range(2):
        assert opened.attention("fused", pool, layout, "bfloat16").fused == (False,)
    (record,) = caplog.records
    assert record.message.startswith("keys are float16 and queries bfloat16, of which npu_fused")
    assert record.message.endswith("Pass --kv-cache-dtype bfloat16.")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", [3, 1001])
def test_rotations_that_are_stretched_go_through_the_operator_within_its_range(device, interleaved, heads):
    """Tables of YaRN and LongRoPE exceed 1, which npu_rotary_mul does not take; too many heads go by torch."""
    import numpy as np

    rng = np.random.default_rng(11)
    angles = np.arange(6)[:, None] * rng.uniform(0.1, 1, 8)
    cos, sin = (1.37 * turn(angles).astype(np.float32) for turn in (np.cos, np.sin))
    x = rng.normal(size=(2, heads, 16)).astype(np.float32)
    at = np.array([0, 4], np.int32)
    tables = device.ops.from_host(cos), device.ops.from_host(sin)
    got = device.ops.to_host(device.ops.rope(device.ops.from_host(x), device.ops.from_host(at), *tables, interleaved))
    pairs = x.reshape(2, heads, 8, 2) if interleaved else x.reshape(2, heads, 2, 8).swapaxes(2, 3)
    c, s = cos[at][:, None], sin[at][:, None]
    turned = np.stack((pairs[..., 0] * c - pairs[..., 1] * s, pairs[..., 1] * c + pairs[..., 0] * s), axis=-1)
    want = turned.reshape(x.shape) if interleaved else turned.swapaxes(2, 3).reshape(x.shape)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_the_peak_of_a_step_is_measured(device):
    import numpy as np

    def run() -> None:
        device.ops.from_host(np.zeros((256, 1024), np.float32))

    assert device.activation_peak(run) == 256 * 1024 * 4
