"""The ROCm platform: floats of 8 bits by chip, formats of another vendor, AITER where it is installed."""

from __future__ import annotations

import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from emulated_gpu import emulated, fake_aiter, harness, install  # noqa: E402

from cardan.platform import Evidence, LinearSpec, ModelFacts, Support  # noqa: E402
from cardan.quantization import dequantize  # noqa: E402
from cardan.testing.conformance import Subject  # noqa: E402
from cardan.testing.conformance.attention_bench import Row  # noqa: E402
from cardan.testing.conformance.attention_checks import make_layer, try_case  # noqa: E402
from cardan.testing.conformance.linear_checks import make_view  # noqa: E402
from cardan.testing.conformance.tiny_checkpoint import TinyCheckpoint  # noqa: E402
from cardan.testing.conformance.tiny_configs import TINY_CONFIGS  # noqa: E402
from cardan.types import ForwardMode, KVKind, KVLayout  # noqa: E402
from cardan_kernels.attention.variants import WIDEST_IN_REGISTERS  # noqa: E402
from cardan_kernels.linear import pack_coded, scaled_from  # noqa: E402
from cardan_rocm import aiter_limits, device, rocm_platform  # noqa: E402
from cardan_rocm.aiter_limits import AITER, why_not_aiter  # noqa: E402
from cardan_rocm.device import FLOAT8_FORMS, rocm_linears  # noqa: E402
from cardan_rocm.features import WIDEST_HEADS, float8_form, rocm_features  # noqa: E402
from cardan_torch.gpu import linears  # noqa: E402
from cardan_torch.gpu.emulation import EmulatedAccelerator  # noqa: E402
from cardan_torch.gpu.linears import CodedLinear, GpuDenseWeight, ScaledLinear  # noqa: E402


@pytest.mark.parametrize(("arch", "form"), [("gfx942", "fnuz"), ("gfx950", "fn"), ("gfx1100", None)])
def test_each_chip_has_its_form_of_floats_of_8_bits(arch, form):
    assert float8_form(arch) == form
    scaled = rocm_linears(EmulatedAccelerator(arch))[0]
    spec = LinearSpec(name="w", out_features=16, in_features=128, dtype="bfloat16")
    assert (scaled.claims("FP8_128_F32", spec) is None) == (form is not None)
    if form is None:
        assert scaled.claims("FP8_128_F32", spec) == "this chip multiplies no floats of 8 bits"
        assert "widened as they are multiplied" in rocm_features(arch, has_aiter=False)["weights:FP8_128_F32"].reason


@pytest.mark.parametrize("form", ["fn", "fnuz"])
def test_a_checkpoint_in_the_other_form_keeps_its_values_by_scales_that_are_doubled(form):
    view = make_view("FP8_128_F32", 8, 256, np.random.default_rng(3))
    raw = np.frombuffer(view.data, np.uint8).copy().reshape(8, 2, 132)
    raw[0, 0, 4:6] = (0x80, 0x00)  # -0 of the form fn, which is NaN in the other
    view = type(view)(view.name, view.dtype, view.shape, raw.reshape(-1).data)
    coded = pack_coded((view,), 256, "cpu")
    matrix = scaled_from(coded, FLOAT8_FORMS[form])
    scales = matrix.scales.T.repeat_interleave(matrix.group, dim=1)
    values = matrix.codes.float() * scales
    assert torch.equal(values, torch.from_numpy(dequantize(view)).reshape(8, 256))
    factor = 2.0 if form == "fnuz" else 1.0
    assert torch.equal(matrix.scales, factor * coded.scales.float())
    assert matrix.codes.dtype is FLOAT8_FORMS[form]


def test_formats_of_nvidias_chips_are_refused_with_the_reason():
    answer = rocm_features("gfx950", has_aiter=False)["weights:NVFP4"]
    assert answer.support is Support.UNSUPPORTED
    assert "NVIDIA's tensor cores only" in answer.reason
    assert answer.alternative == "Choose another checkpoint"
    method = CodedLinear(torch.device("cpu"), refused=frozenset({"NVFP4"}))
    spec = LinearSpec(name="w", out_features=16, in_features=128, dtype="bfloat16")
    assert method.claims("NVFP4", spec) == "NVFP4 is a format of another vendor's chips"
    assert rocm_features("gfx942", has_aiter=True)["attention:flashinfer"].support is Support.UNSUPPORTED


def test_float32_activations_are_not_rounded_to_8_bits():
    method = ScaledLinear(torch.device("cpu"), torch.float8_e4m3fn, torch_gemm=False)
    spec = LinearSpec(name="w", out_features=16, in_features=128, dtype="float32")
    assert method.claims("FP8_128_F32", spec) == "activations are float32, which are not rounded to 8 bits"
    assert method.claims("INT8_128_F32_A8", spec) is None
    assert method.claims("Q8_0", spec) == "Q8_0 is not multiplied with activations of 8 bits"


@pytest.fixture
def library(monkeypatch):
    install(monkeypatch, "aiter", fake_aiter())
    for user in (rocm_platform, device):
        monkeypatch.setattr(user, "has_aiter", lambda: True)
    monkeypatch.setattr(device, "AiterDenseLinear", device.GpuDenseLinear)


WIDE = {"q_heads": 4, "kv_heads": 2, "k_dim": 64, "v_dim": 64, "scale": 0.125}


@pytest.mark.parametrize("softcap", [None, pytest.param(2.0, marks=pytest.mark.slow)])
def test_its_functions_attend_as_the_reference_does(library, softcap):
    layer = make_layer(**WIDE, softcap=softcap)
    with Subject(emulated("rocm"), options=("device=emulated",)) as subject:
        for mode, rows in (
            (ForwardMode.DECODE, (Row(0, 1), Row(16, 1), Row(300, 1))),
            (ForwardMode.MIXED, (Row(0, 17), Row(33, 5), Row(20, 1))),
        ):
            try_case(subject, "aiter", mode, rows, layer, dtype="bfloat16", kv_dtype="bfloat16")


def test_slots_and_parts_of_all_captured_steps_stand_in_the_same_memory(library, monkeypatch):
    platform = emulated("rocm")
    opened = platform.open(platform.devices()[0], {"device": "emulated"})
    layer = make_layer(**WIDE)
    layout = KVLayout(layers=(layer,), page_size=1, dtype="bfloat16")
    places = set()

    def decode(out, workspace, q, keys, values, scale, starts, slots, *others):
        places.add((workspace.data_ptr(), slots.data_ptr()))

    monkeypatch.setattr(sys.modules["aiter"], "paged_attention_ragged", decode)
    with opened.scope():
        pool = opened.allocate_kv(layout, 128, 5, 64)
        backend = opened.attention("aiter", pool, layout, "bfloat16")
        plans = [backend.fixed_plan(rows) for rows in (4, 2, 1)]
        for plan in plans:
            rows = plan.triton.arrays.num_rows
            q, k, v = (torch.zeros(rows, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
            backend.forward(q, k, v, layer, plan)
    assert len(places) == 1


def test_replayed_steps_follow_lists_of_slots_that_are_filled_anew(library, tmp_path):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    folder = TinyCheckpoint(tmp_path, {**TINY_CONFIGS["LlamaForCausalLM"], **sizes}).folder
    tokens = {}
    for backend in ("aiter", "triton"):
        gpu = harness("rocm", folder, dtype="bfloat16")
        for phase in ("prefill", "decode"):
            gpu.plan = gpu.plan.with_setting(f"{phase}_attention_backend", backend, "flag", "asked for")
        gpu.runner = gpu.device.runner(gpu.loaded, gpu.pool, gpu.plan)
        tokens[backend] = gpu.generate(1, [5, 6, 7, 8], 4)
    assert tokens["aiter"] == tokens["triton"]


def facts(dtype="bfloat16", **layer):
    return ModelFacts(
        name="m", architecture="LlamaForCausalLM", family="llama", num_layers=1, hidden_size=64, intermediate_size=64,
        vocab_size=100, context_length=128, layers=(make_layer(**{**WIDE, **layer}),), num_parameters=1,
        weight_bytes=1, weight_formats={"BF16": 1}, native_dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "arch", "installed", "reason"),
    [
        (facts(), "gfx942", False, "aiter is not installed"),
        (facts(), "gfx1100", True, "aiter's kernels are for gfx942 and gfx950, this is gfx1100"),
        (facts("float32"), "gfx942", True, "aiter computes in bfloat16 and float16, the model is float32"),
        (facts(sinks=True), "gfx942", True, "aiter is installed, but its kernels take no attention sinks"),
        (facts(window=5, kind=KVKind.SLIDING), "gfx950", True, "aiter is installed, but layers of kind sliding"),
        (facts(k_dim=80, v_dim=80), "gfx950", True, "aiter is installed, but its kernels take heads of 64 and 128"),
        (facts(), "gfx950", True, None),
    ],
)
def test_why_a_model_attends_by_triton_stands_in_the_plan(model, arch, installed, reason, monkeypatch):
    monkeypatch.setattr(rocm_platform, "has_aiter", lambda: installed)
    found = emulated("rocm").recommended_attention(model, arch)
    assert found.value == ("triton" if reason else "aiter")
    if reason:
        assert found.why.startswith(reason)
        assert why_not_aiter(model, arch, installed) == found.why
    else:
        assert AITER.why_not_layer(model.layers[0]) is None


def test_a_plan_says_where_heads_are_too_wide_for_the_registers_of_a_chip():
    wide = facts(k_dim=256, v_dim=256)
    said = emulated("rocm").recommended_attention(wide, "gfx1100").why
    assert said.endswith("; prompts run slowly: Triton's prefill over heads wider than 128 spills registers on gfx1100")
    for model, arch in ((wide, "gfx942"), (facts(), "gfx1100")):
        assert "slowly" not in emulated("rocm").recommended_attention(model, arch).why
    assert WIDEST_HEADS == WIDEST_IN_REGISTERS


def test_aiter_is_claimed_on_no_evidence_where_it_is_installed_and_knows_the_chip():
    found = rocm_features("gfx942", has_aiter=True)["attention:aiter"]
    assert (found.support, found.evidence) == (Support.NATIVE, Evidence.NONE)
    for arch, has in (("gfx1100", True), ("gfx942", False)):
        assert rocm_features(arch, has_aiter=has)["attention:aiter"].support is Support.UNSUPPORTED


def test_another_package_of_the_same_name_is_not_taken_for_it(monkeypatch, tmp_path):
    from types import SimpleNamespace

    origin = tmp_path / "__init__.py"
    monkeypatch.setattr(aiter_limits, "find_spec", lambda name: SimpleNamespace(origin=str(origin)))
    assert not aiter_limits.has_aiter()
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "mha.py").touch()
    assert aiter_limits.has_aiter()


@pytest.mark.parametrize(("hip", "calls"), [(None, 1), ("6.4.1", 0)])
def test_products_of_16_bits_in_float32_are_asked_of_nvidias_gemm_only(hip, calls, monkeypatch):
    """On tensors without numbers: whether AMD's takes them is to be seen on a device."""
    asked = []

    def mm(x, weight, *, out_dtype):
        asked.append(out_dtype)
        return torch.empty(len(x), weight.shape[1], dtype=out_dtype, device=x.device)

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch, "mm", mm)
    weight = GpuDenseWeight(torch.empty(40, 8, dtype=torch.bfloat16, device="meta"), None)
    out = weight.apply_float32(torch.empty(3, 8, dtype=torch.bfloat16, device="meta"))
    assert (out.shape, out.dtype) == ((3, 40), torch.float32)
    assert asked == [torch.float32] * calls


def test_widened_products_are_the_same_in_pieces_of_the_weight(monkeypatch):
    monkeypatch.setattr(linears, "WIDENED_ROWS", 3)
    random = torch.Generator().manual_seed(0)
    x, rows = (torch.randint(-8, 8, shape, generator=random).bfloat16() for shape in ((3, 16), (8, 16)))
    bias = torch.arange(8).bfloat16()
    out = GpuDenseWeight(rows, bias).apply_float32(x)
    assert torch.equal(out, x.float() @ rows.float().T + bias.float())
