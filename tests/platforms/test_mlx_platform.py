"""What the MLX platform says of itself: installed or not, on a Mac or on Linux, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig
from cardan.engine.preparation import resolve_plan
from cardan.errors import ConfigError, UnsupportedError
from cardan.platform import DeviceInfo, Evidence, Feature, ModelFacts, Support
from cardan.platform.resolve import platform_facts, resolve
from cardan.testing import write_tiny_model
from cardan.types import LayerKV
from cardan_mlx import backend as mlx_backend
from cardan_mlx import mlx_platform
from cardan_mlx.backend import OLDEST_MLX, Backend
from cardan_mlx.mlx_platform import MlxPlatform

ROOT = Path(__file__).parents[2]

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
def computes_on(monkeypatch):
    """Makes MLX be there and compute on a back end, on a Mac or on Linux."""

    def choose(found, on_apple):
        monkeypatch.setattr(mlx_platform, "backend", lambda: found)
        monkeypatch.setattr(mlx_platform, "missing", lambda **_: None)
        monkeypatch.setattr(mlx_platform, "_on_apple", lambda: on_apple)

    return choose


@pytest.fixture
def on_mac(computes_on):
    computes_on(Backend.METAL, True)


@pytest.fixture
def on_linux(computes_on):
    computes_on(Backend.CPU, False)


def test_asking_about_the_platform_imports_no_array_library():
    code = (
        "import sys\n"
        "from cardan_mlx import platform\n"
        "platform.probe(), platform.options()\n"
        "print(sorted({'torch', 'mlx.core'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_mlx_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(mlx_backend, "find_spec", lambda name: None)
    answer = MlxPlatform().probe()
    assert (answer.score, answer.usable) == (0, False)
    assert answer.reason == "mlx is not installed; `pip install 'cardan[mlx]'` brings it"
    assert MlxPlatform().devices() == ()


@pytest.mark.parametrize(
    ("versions", "library", "reason"),
    [
        ({"mlx": "0.29.0"}, True, r"mlx 0\.29\.0 is installed, 0\.30\.4 or newer is needed; `pip install -U"),
        ({"mlx": "0.30.3.dev7"}, True, r"mlx 0\.30\.3\.dev7 is installed, 0\.30\.4 or newer"),
        ({"mlx": "0.32.4", "mlx-cuda-12": "0.32.4"}, True, r"MLX's CUDA back end \(mlx-cuda-12\) is installed, which"),
        (
            {"mlx": "0.32.4"},
            False,
            r"mlx is installed without a back end; `pip install 'cardan\[mlx\]'` brings its CPU",
        ),
        ({"mlx": "0.30.4"}, True, None),
        ({"mlx": "1.0"}, True, None),
        ({}, True, None),
    ],
)
def test_an_mlx_that_cannot_be_computed_with_says_why(monkeypatch, tmp_path, versions, library, reason):
    if library:
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "libmlx.so").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(mlx_backend, "find_spec", lambda name: spec)
    monkeypatch.setattr(mlx_backend, "_version", versions.get)
    monkeypatch.setattr(mlx_platform, "_on_apple", lambda: False)
    monkeypatch.setattr(mlx_platform.host, "system", lambda: "Linux")
    answer = MlxPlatform().probe()
    assert answer.usable is (reason is None)
    if reason is not None:
        assert answer.score == 0
        assert re.match(reason, answer.reason)
        assert MlxPlatform().devices() == ()


def test_the_requirement_names_the_oldest_mlx_that_works():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = ".".join(map(str, OLDEST_MLX))
    floors = [
        requirement.partition(">=")[2].partition(";")[0] for requirement in project["optional-dependencies"]["mlx"]
    ]
    assert floors == [oldest, oldest]


def test_its_types_are_told_to_those_who_import_it():
    assert (Path(mlx_platform.__file__).with_name("py.typed")).is_file()


def test_on_a_mac_it_goes_before_the_cpu_and_on_linux_after(computes_on):
    from cardan_cpu.cpu_platform import SCORE

    computes_on(Backend.METAL, True)
    assert MlxPlatform().probe().score > SCORE
    for on_apple in (True, False):
        computes_on(Backend.CPU, on_apple)
        assert 0 < MlxPlatform().probe().score < SCORE
        assert "CPU build is slow" in MlxPlatform().probe().reason


def test_a_mac_whose_mlx_cannot_start_is_no_choice(on_mac, monkeypatch):
    def fail():
        raise ImportError("libmlx.dylib is missing")

    monkeypatch.setattr(mlx_platform, "backend", fail)
    answer = MlxPlatform().probe()
    assert (answer.score, answer.usable, answer.reason) == (0, False, "libmlx.dylib is missing")


@pytest.mark.parametrize(
    ("kind", "metal", "want"), [("cpu", True, Backend.CPU), ("cpu", False, Backend.CPU), ("gpu", True, Backend.METAL)]
)
def test_what_is_claimed_is_what_is_opened(monkeypatch, kind, metal, want):
    """A Mac may have no Metal, or a program may have told MLX to compute on the cores."""
    mx = pytest.importorskip("mlx.core")
    from cardan_mlx.device import MlxDevice

    monkeypatch.setattr(mlx_platform, "_on_apple", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=getattr(mx, kind)))
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    assert mlx_backend.backend() is want
    capabilities = MlxPlatform().capabilities(INFO)
    device = MlxDevice(INFO)
    assert capabilities.supports("attention:metal") is device._metal is (want is Backend.METAL)
    assert capabilities.supports(Feature.GRAPH) is (want is Backend.METAL)
    assert device.ops._has_float64 is (want is Backend.CPU)
    assert (MlxPlatform().probe().score == mlx_platform.APPLE_SCORE) is (want is Backend.METAL)


def test_another_gpu_is_refused_wherever_it_is_met(monkeypatch):
    mx = pytest.importorskip("mlx.core")
    from cardan_mlx.device import MlxDevice

    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    asked = (
        MlxPlatform().devices,
        lambda: MlxPlatform().capabilities(INFO),
        lambda: MlxPlatform().recommend(facts(), INFO),
        lambda: MlxDevice(INFO),
    )
    for ask in asked:
        with pytest.raises(UnsupportedError, match=r"on Metal or on its CPU build .* got a GPU that is not .* Install"):
            ask()


def test_metal_without_a_gpu_is_an_error_that_says_so(monkeypatch):
    mx = pytest.importorskip("mlx.core")
    from cardan_mlx import memory

    def fail():
        raise RuntimeError("Failed to load device")

    monkeypatch.setattr(mx, "device_info", fail)
    with pytest.raises(UnsupportedError, match=r"must find a GPU through Metal .* got 'Failed to load device'. Choose"):
        memory.describe_device()


def test_nothing_is_claimed_of_metal_that_was_not_run(on_mac):
    capabilities = MlxPlatform().capabilities(INFO)
    assert {answer.evidence for answer in capabilities.features.values()} == {Evidence.NONE}
    assert capabilities.get("attention:metal").support is Support.NATIVE
    assert "not run yet" in capabilities.get(Feature.GRAPH).reason
    assert "has been run on Metal" in capabilities.notes[0]
    assert capabilities.family("attention")[0] == "gather"


def test_what_the_cpu_build_lacks_has_a_reason(on_linux):
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
def test_the_type_of_activations_fits_the_weights(computes_on, apple, model, want):
    computes_on(Backend.METAL if apple else Backend.CPU, apple)
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


def test_the_plan_says_what_happens_to_each_format(on_linux):
    said = {item.fmt: (item.native, item.why) for item in plan(facts(Q4_1=3, Q6_K=1, Q3_K=1, F32=2)).formats}
    assert said["Q4_1"] == (True, "mapped exactly onto MLX's affine groups of 32")
    assert said["Q6_K"] == (True, "requantized at load to 8 bits over groups of 32: MLX has no groups of 16")
    assert said["Q3_K"] == (False, "widened at load: MLX has no groups of 16")


def test_what_is_refused_names_what_works(on_linux):
    with pytest.raises(UnsupportedError, match=r"--attention-backend must be one of gather .* got 'metal' \(the"):
        plan(facts(), attention_backend="metal")
    with pytest.raises(UnsupportedError, match=r"--tp-size must be 1 on platform 'mlx', got 2: there is one device"):
        plan(facts(), tp_size=2)
    with pytest.raises(UnsupportedError, match=r"makes at load \(mlx_q4, mlx_q8\), got 'awq'"):
        plan(facts(), m={"quantization": "awq"})
    with pytest.raises(UnsupportedError, match=r"--kv-cache-dtype must be one of float16, bfloat16, float32"):
        plan(facts(), kv_cache_dtype="fp8_e4m3")


@pytest.mark.parametrize("ask", [lambda given: MlxPlatform().open(INFO, given), MlxPlatform().configured])
def test_an_option_below_zero_is_refused_before_there_is_a_plan(ask):
    with pytest.raises(
        ConfigError, match=r"cache_limit_mib must be 0 \(automatic\) or more, got -1\. Pass --platform-o"
    ):
        ask({"cache_limit_mib": -1})


def test_a_plan_refuses_it_too(tmp_path):
    pytest.importorskip("mlx.core")
    model = ModelConfig(model=str(write_tiny_model(tmp_path / "tiny")), random_weights=1)
    for text in ("-1", "0", "64"):
        config = EngineConfig(
            model=model, platform=PlatformConfig(platform="mlx", options=(f"cache_limit_mib={text}",))
        )
        if text == "-1":
            with pytest.raises(ConfigError, match="cache_limit_mib must be 0"):
                resolve_plan(config)
        else:
            assert resolve_plan(config).platform_options == {"cache_limit_mib": int(text)}


def test_the_device_is_described():
    mx = pytest.importorskip("mlx.core")
    (info,) = MlxPlatform().devices()
    assert info.name
    assert f"mlx {mx.__version__}" in info.detail
    assert info.total_memory > 2**30
