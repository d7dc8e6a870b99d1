"""What the MLX platform says of itself: installed or not, on a Mac or on Linux, and what it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig
from cardan.errors import ConfigError, UnsupportedError
from cardan.platform import DeviceInfo, Evidence, Feature, ModelFacts, Support
from cardan.platform.resolve import platform_facts, resolve
from cardan.types import LayerKV
from cardan_mlx import mlx_platform
from cardan_mlx.mlx_platform import MlxPlatform

INFO = DeviceInfo(index=0, name="test")


def facts(family="llama", dtype="bfloat16", **formats):
    layer = LayerKV(index=0, q_heads=2, kv_heads=1, k_dim=8, v_dim=8, scale=1.0)
    return ModelFacts(
        name="tiny",
        architecture="LlamaForCausalLM",
        family=family,
        num_layers=1,
        hidden_size=16,
        intermediate_size=32,
        vocab_size=100,
        context_length=128,
        layers=(layer,),
        num_parameters=1000,
        weight_bytes=4000,
        weight_formats=formats or {"BF16": 9},
        native_dtype=dtype,
    )


@pytest.fixture
def on_mac(monkeypatch):
    monkeypatch.setattr(mlx_platform, "_on_apple", lambda: True)
    monkeypatch.setattr(mlx_platform, "_installed", lambda: True)


def test_asking_about_the_platform_imports_no_array_library():
    code = (
        "import sys\n"
        "from cardan_mlx import platform\n"
        "platform.probe(), platform.options()\n"
        "print(sorted({'torch', 'mlx.core', 'numpy.linalg'} & set(sys.modules) - {'numpy.linalg'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_mlx_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(mlx_platform, "find_spec", lambda name: None)
    answer = MlxPlatform().probe()
    assert (answer.score, answer.usable) == (0, False)
    assert answer.reason == "mlx is not installed; `pip install 'cardan[mlx]'` brings it"
    assert MlxPlatform().devices() == ()


def test_on_a_mac_it_goes_before_the_cpu_and_on_linux_after(on_mac, monkeypatch):
    from cardan_cpu.cpu_platform import SCORE

    assert MlxPlatform().probe().score > SCORE
    monkeypatch.setattr(mlx_platform, "_on_apple", lambda: False)
    assert 0 < MlxPlatform().probe().score < SCORE
    assert "CPU build is slow" in MlxPlatform().probe().reason


def test_nothing_is_claimed_of_metal_that_was_not_run(on_mac):
    capabilities = MlxPlatform().capabilities(INFO)
    assert {answer.evidence for answer in capabilities.features.values()} == {Evidence.NONE}
    assert capabilities.get("attention:metal").support is Support.NATIVE
    assert "not run yet" in capabilities.get(Feature.GRAPH).reason
    assert "has been run on Metal" in capabilities.notes[0]
    assert capabilities.family("attention")[0] == "gather"


def test_what_the_cpu_build_lacks_has_a_reason(monkeypatch):
    monkeypatch.setattr(mlx_platform, "_on_apple", lambda: False)
    capabilities = MlxPlatform().capabilities(INFO)
    for name, answer in capabilities.features.items():
        assert answer.reason, name
    assert capabilities.get("attention:metal").support is Support.UNSUPPORTED
    assert capabilities.get(Feature.GRAPH).support is Support.UNSUPPORTED
    assert set(Feature) <= set(capabilities.features)


@pytest.mark.parametrize(
    ("apple", "model", "want"),
    [
        (False, facts(), "float32"),
        (False, facts(Q4_1=5, F32=2), "float32"),
        (True, facts(), "bfloat16"),
        (True, facts(dtype="float16"), "float16"),
        (True, facts(Q4_1=5, F32=2), "float16"),
        (True, facts(Q6_K=5), "float16"),
        (True, facts("gemma2", Q4_1=5), "float32"),
        (True, facts(AFFINE4_64_BF16=5), "bfloat16"),
        (True, facts(dtype="float64"), "float16"),
    ],
)
def test_the_type_of_activations_fits_the_weights(monkeypatch, apple, model, want):
    monkeypatch.setattr(mlx_platform, "_on_apple", lambda: apple)
    recommended = MlxPlatform().recommend(model, INFO)
    assert recommended["dtype"].value == want
    assert recommended["dtype"].why
    assert recommended["chunked_prefill_size"].value == 1024
    assert recommended["max_running_requests"].value == 64


def plan(model, **platform):
    config = EngineConfig(
        model=ModelConfig(**platform.pop("m", {})),
        platform=PlatformConfig(platform="mlx", **platform),
        cache=CacheConfig(),
    )
    return resolve(config, model, platform_facts(MlxPlatform(), INFO, model))


def test_the_plan_says_what_happens_to_each_format():
    said = {item.fmt: (item.native, item.why) for item in plan(facts(Q4_1=3, Q6_K=1, Q3_K=1, F32=2)).formats}
    assert said["Q4_1"] == (True, "mapped exactly onto MLX's affine groups of 32")
    assert said["Q6_K"] == (True, "requantized at load to 8 bits over groups of 32: MLX has no groups of 16")
    assert said["Q3_K"] == (False, "widened at load: MLX has no groups of 16")


def test_what_is_refused_names_what_works():
    with pytest.raises(UnsupportedError, match=r"--attention-backend must be one of gather .* got 'metal' \(the"):
        plan(facts(), attention_backend="metal")
    with pytest.raises(UnsupportedError, match=r"--tp-size must be 1 on platform 'mlx', got 2: there is one device"):
        plan(facts(), tp_size=2)
    with pytest.raises(UnsupportedError, match=r"makes at load \(mlx_q4, mlx_q8\), got 'awq'"):
        plan(facts(), m={"quantization": "awq"})
    with pytest.raises(UnsupportedError, match=r"--kv-cache-dtype must be one of float16, bfloat16, float32"):
        plan(facts(), kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ConfigError, match=r"cache_limit_mib must be 0 \(automatic\) or more, got -1"):
        MlxPlatform().open(INFO, {"cache_limit_mib": -1})


def test_the_device_is_described():
    pytest.importorskip("mlx.core")
    (info,) = MlxPlatform().devices()
    assert info.name
    assert "mlx 0." in info.detail
    assert info.total_memory > 2**30
