"""FlashInfer's attention: which layers go to it, how its wrappers are planned, and replayed decode steps.

The library itself needs a GPU; a module with its documented calls stands in for it, and attends in plain torch.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from emulated_gpu import emulated, fake_flashinfer, harness, install  # noqa: E402

from cardan.platform import Evidence, ModelFacts, Support  # noqa: E402
from cardan.testing.conformance import Subject  # noqa: E402
from cardan.testing.conformance.attention_bench import Row  # noqa: E402
from cardan.testing.conformance.attention_checks import make_layer, try_case  # noqa: E402
from cardan.testing.conformance.tiny_checkpoint import TinyCheckpoint  # noqa: E402
from cardan.testing.conformance.tiny_configs import TINY_CONFIGS  # noqa: E402
from cardan.types import ForwardMode, KVKind, KVLayout  # noqa: E402
from cardan_cuda import cuda_platform, device  # noqa: E402
from cardan_cuda.features import cuda_features  # noqa: E402
from cardan_cuda.flashinfer_limits import FLASHINFER, on_tensor_cores, why_not_flashinfer  # noqa: E402

WIDE = {"q_heads": 4, "kv_heads": 2, "k_dim": 64, "v_dim": 64, "scale": 0.125}
DECODE = (Row(0, 1), Row(16, 1), Row(40, 1))
EXTEND = (Row(0, 17), Row(33, 5), Row(20, 1))


@pytest.fixture
def library(monkeypatch):
    module = fake_flashinfer()
    install(monkeypatch, "flashinfer", module)
    for user in (cuda_platform, device):
        monkeypatch.setattr(user, "flashinfer_version", lambda: "0.7.2")
    return module


@pytest.mark.parametrize("page", [pytest.param(1, marks=pytest.mark.exhaustive), 16])
@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("window", "softcap"))]
)
def test_its_wrappers_attend_as_the_reference_does(library, page, kind):
    more = {"plain": {}, "window": {"window": 9, "kind": KVKind.SLIDING}, "softcap": {"softcap": 2.0}}[kind]
    layer = make_layer(**WIDE, **more)
    with Subject(emulated("cuda"), options=("device=emulated",)) as subject:
        for mode, rows in ((ForwardMode.DECODE, DECODE), (ForwardMode.MIXED, EXTEND)):
            try_case(subject, "flashinfer", mode, rows, layer, page=page, dtype="bfloat16", kv_dtype="bfloat16")


def test_layers_that_it_does_not_take_go_through_triton(library):
    layer = make_layer()
    assert FLASHINFER.why_not_layer(layer) is not None
    with Subject(emulated("cuda"), options=("device=emulated",)) as subject:
        try_case(subject, "flashinfer", ForwardMode.DECODE, DECODE, layer, dtype="bfloat16", kv_dtype="bfloat16")


def test_lists_of_pages_of_all_captured_steps_stand_in_the_same_memory(library):
    platform = emulated("cuda")
    device = platform.open(platform.devices()[0], {"device": "emulated"})
    layout = KVLayout(layers=(make_layer(**WIDE),), page_size=16, dtype="bfloat16")
    with device.scope():
        pool = device.allocate_kv(layout, 128, 5, 64)
        backend = device.attention("flashinfer", pool, layout, "bfloat16")
        plans = [backend.fixed_plan(rows) for rows in (4, 2, 1)]
    lists = [wrapper.buffers["indices"] for plan in plans for wrapper in plan.wrappers.values()]
    assert [len(pages) for pages in lists] == [rows * 64 // 16 for rows in (4, 2, 1)]
    assert len({pages.data_ptr() for pages in lists}) == 1


def test_replayed_steps_are_planned_anew_over_the_same_memory(library, tmp_path):
    config = {
        **TINY_CONFIGS["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
    }
    folder = TinyCheckpoint(tmp_path, config).folder
    tokens = {}
    for backend in ("flashinfer", "triton"):
        gpu = harness("cuda", folder, dtype="bfloat16")
        gpu.plan = gpu.plan.with_setting("prefill_attention_backend", backend, "flag", "asked for")
        gpu.plan = gpu.plan.with_setting("decode_attention_backend", backend, "flag", "asked for")
        gpu.runner = gpu.device.runner(gpu.loaded, gpu.pool, gpu.plan)
        tokens[backend] = gpu.generate(1, [5, 6, 7, 8], 2)
        bucket = gpu.runner._graph._buckets[1]
        if backend == "flashinfer":
            (wrapper,) = bucket.plan.wrappers.values()
            first = {name: buffer.data_ptr() for name, buffer in wrapper.buffers.items()}
        tokens[backend] += [int(gpu.step((1, [-1])).tokens[0]) for _ in range(2)]
        if backend == "flashinfer":
            (wrapper,) = gpu.runner._graph._buckets[1].plan.wrappers.values()
            assert wrapper.use_cuda_graph
            assert wrapper.plans == 1 + 3
            assert first.keys() == {"indptr", "indices", "last"}
            assert {name: buffer.data_ptr() for name, buffer in wrapper.buffers.items()} == first
            assert len(wrapper.buffers["indices"]) == gpu.plan.context_length
    assert tokens["flashinfer"] == tokens["triton"]


def facts(dtype="bfloat16", **layer):
    return ModelFacts(
        name="m", architecture="LlamaForCausalLM", family="llama", num_layers=1, hidden_size=64, intermediate_size=64,
        vocab_size=100, context_length=128, layers=(make_layer(**{**WIDE, **layer}),), num_parameters=1,
        weight_bytes=1, weight_formats={"BF16": 1}, native_dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "version", "reason"),
    [
        (facts(), None, "flashinfer is not installed"),
        (facts("float32"), "0.7", "flashinfer computes in bfloat16 and float16, the model is float32"),
        (facts(sinks=True), "0.7", "flashinfer is installed, but its kernels take no attention sinks"),
        (facts(k_dim=80, v_dim=80), "0.7", "flashinfer is installed, but its kernels take heads of 64, 128 and 256"),
        (facts(kind=KVKind.LATENT), "0.7", "flashinfer is installed, but layers of kind latent need another kernel"),
        (facts(), "0.7", None),
    ],
)
def test_why_a_model_attends_by_triton_stands_in_the_plan(model, version, reason, monkeypatch):
    monkeypatch.setattr(cuda_platform, "flashinfer_version", lambda: version)
    found = emulated("cuda").recommended_attention(model, "sm_90")
    assert found.value == ("triton" if reason else "flashinfer")
    if reason:
        assert found.why.startswith(reason)
        assert why_not_flashinfer(model, version) == found.why


def test_it_is_claimed_only_where_it_is_installed_and_never_on_evidence_that_there_is_not():
    absent = cuda_features("sm_90", None)["attention:flashinfer"]
    assert (absent.support, absent.reason) == (Support.UNSUPPORTED, "flashinfer is not installed")
    present = cuda_features("sm_90", "0.7.2")["attention:flashinfer"]
    assert (present.support, present.evidence) == (Support.NATIVE, Evidence.NONE)


def test_decode_goes_over_tensor_cores_where_heads_share_keys_or_keys_have_8_bits():
    assert not on_tensor_cores(make_layer(q_heads=4, kv_heads=2), "bfloat16")
    assert on_tensor_cores(make_layer(q_heads=6, kv_heads=2), "bfloat16")
    assert on_tensor_cores(make_layer(q_heads=8, kv_heads=2), "bfloat16")
    assert on_tensor_cores(make_layer(q_heads=2, kv_heads=2), "fp8_e4m3")


def test_its_real_wrappers_take_what_they_are_given():
    """Where the library is installed: every argument that is passed has a parameter."""
    real = pytest.importorskip("flashinfer")
    import inspect

    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        known = set(inspect.signature(getattr(real, name).__init__).parameters)
        ours = set(inspect.signature(getattr(fake_flashinfer(), name).__init__).parameters)
        assert ours <= known
