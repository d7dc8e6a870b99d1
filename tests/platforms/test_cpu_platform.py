"""The CPU platform: what it says of the machine, container limits by fake files, threads, and its linears."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cardan.config import EngineConfig, ModelConfig, PlatformConfig
from cardan.engine.preparation import resolve_plan
from cardan.errors import ConfigError, UnsupportedError
from cardan.platform import DeviceInfo, Evidence, Feature, LinearSpec, Memory, SharedMemoryPolicy, Support, host_memory
from cardan.platform.cgroups import cpu_quota, memory_limit
from cardan.quantization import FORMATS
from cardan.testing import write_tiny_model
from cardan.types import TensorView
from cardan_cpu import platform
from cardan_cpu.cpu_platform import _recommended_dtype
from cardan_cpu.device import CpuDevice, default_threads
from cardan_cpu.host import Host, compute_threads, read_host, usable_cores
from cardan_cpu.kernels import KINDS, NATIVE, TORCH, VERIFIED, Choice, choose
from cardan_cpu.linear import WIDEN_FROM_ROWS, CpuDenseLinear, WideningWeight
from cardan_torch import DenseLinear

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = {
    "proc/self/cgroup": "0::/outer/inner\n",
    "sys/fs/cgroup/outer/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/outer/memory.current": f"{3 * GIB}\n",
    "sys/fs/cgroup/outer/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    "sys/fs/cgroup/outer/inner/memory.max": "max\n",
    "sys/fs/cgroup/outer/inner/memory.current": f"{GIB}\n",
    "sys/fs/cgroup/outer/inner/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/outer/cpu.max": "max 100000\n",
}
V1 = {
    "proc/self/cgroup": "5:cpuacct,cpu:/box\n4:memory:/box\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{9 * GIB}\n",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
    "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB}\n",
    "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "50000\n",
    "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
}


WITH_TORCH = {"kernels": "torch"}


def test_importing_and_probing_load_no_torch() -> None:
    code = "import sys, cardan_cpu as c; c.platform.probe(); c.platform.devices(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_limit_of_an_outer_group_counts_and_dropped_cache_does_not(tmp_path: Path) -> None:
    limit = memory_limit(write(tmp_path, V2))
    assert limit is not None
    assert (limit.limit, limit.used, limit.left) == (4 * GIB, 2 * GIB, 2 * GIB)


def test_version_1_files_are_read_and_its_huge_number_is_no_limit(tmp_path: Path) -> None:
    limit = memory_limit(write(tmp_path, V1))
    assert limit is not None
    assert (limit.limit, limit.used) == (2 * GIB, GIB)
    assert cpu_quota(tmp_path) == 1


def test_a_path_of_the_host_that_the_container_does_not_show_falls_back_to_its_root(tmp_path: Path) -> None:
    files = {name.replace("/outer/inner", "").replace("/outer", ""): text for name, text in V2.items()}
    files["proc/self/cgroup"] = "0::/kubepods/pod1\n"
    files["sys/fs/cgroup/memory.max"] = str(GIB)
    files["sys/fs/cgroup/memory.current"] = str(GIB + 5)
    files["sys/fs/cgroup/memory.stat"] = ""
    limit = memory_limit(write(tmp_path, files))
    assert limit is not None
    assert (limit.limit, limit.left) == (GIB, 0)


def test_no_files_mean_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    assert cpu_quota(tmp_path) is None


def test_memory_is_that_of_the_container(tmp_path: Path) -> None:
    memory = host_memory(write(tmp_path, V2))
    assert memory.total == 4 * GIB
    assert memory.free is not None
    assert memory.free <= 2 * GIB
    assert memory.shared
    assert host_memory(tmp_path / "nothing").total > 4 * GIB


def test_cores_follow_the_quota_and_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores(tmp_path) == 8
    assert cpu_quota(write(tmp_path, V2)) == 2
    assert usable_cores(tmp_path) == 2
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    assert usable_cores(tmp_path) == 1


def test_the_processor_is_read_from_cpuinfo(tmp_path: Path) -> None:
    text = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512_bf16\n\nprocessor\t: 1\n"
    host = read_host(write(tmp_path, {"proc/cpuinfo": text}))
    assert (host.name, host.flags, host.has_bfloat16) == ("Some CPU", ("avx2", "avx512_bf16"), True)
    assert not read_host(write(tmp_path, {"proc/cpuinfo": text.replace("avx512_bf16", "")})).has_bfloat16
    assert read_host(tmp_path / "nothing").flags == ()


def test_probe_and_device() -> None:
    answer = platform.probe()
    assert answer.usable
    assert answer.score > 0
    (device,) = platform.devices()
    assert "cores" in device.detail


def installed_only(*names: str):
    return lambda name: object() if name in names else None


def test_without_kernels_the_platform_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cardan_cpu.kernels.find_spec", installed_only())
    answer = platform.probe()
    assert (answer.usable, answer.score) == (False, 0)
    assert "pip install 'cardan[cpu]'" in answer.reason
    assert "pip install ./kernels/native" in answer.reason
    with pytest.raises(ConfigError, match=r"kernels=auto cannot be used here: .*\. Install one of them\."):
        platform.open(platform.devices()[0], {})


def test_torch_computes_where_the_native_kernels_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cardan_cpu.kernels.find_spec", installed_only("torch"))
    assert choose().kind == TORCH
    assert platform.probe().usable
    assert "torch's kernels" in platform.devices()[0].detail
    assert "attention:torch" in platform.capabilities(platform.devices()[0]).features
    with pytest.raises(
        ConfigError, match=r"kernels=native cannot be used here: cardan-native is not installed.*kernels=torch\."
    ):
        platform.configured({"kernels": "native"})


def test_torch_that_is_asked_for_and_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cardan_cpu.kernels.find_spec", installed_only())
    with pytest.raises(ConfigError, match=r"kernels=torch cannot be used here: torch is not installed"):
        platform.configured(WITH_TORCH)


def test_the_option_of_kernels_is_honoured_and_kept_to_the_copy() -> None:
    asked = platform.configured(WITH_TORCH)
    assert asked.probe().reason.startswith("torch is installed")
    assert "torch's kernels" in asked.devices()[0].detail
    assert asked.capabilities(asked.devices()[0]).family("attention") == ("torch",)
    device = asked.open(asked.devices()[0], {"threads": 1, **WITH_TORCH})
    assert isinstance(device, CpuDevice)
    device.close()
    assert platform.asked == "auto"
    (option,) = (option for option in platform.options() if option.name == "kernels")
    assert option.choices == KINDS == ("auto", "native", "torch")


@pytest.mark.parametrize("asked", [kind for kind in KINDS if choose(kind).kind is not None])
def test_every_feature_is_answered_with_a_reason_and_evidence(asked: str) -> None:
    chosen = platform.configured({"kernels": asked})
    capabilities = chosen.capabilities(chosen.devices()[0])
    evidence = VERIFIED.get(choose(asked).variant or "", Evidence.HARDWARE)
    for feature in Feature:
        assert str(feature) in capabilities.features
    for name, answer in capabilities.features.items():
        assert answer.reason, name
        assert not capabilities.supports(name) or answer.evidence is evidence
    assert capabilities.page_sizes[0] == 1


def test_threads_are_honoured_and_negative_ones_refused() -> None:
    before = torch.get_num_threads()
    try:
        device = platform.open(platform.devices()[0], {"threads": 1, **WITH_TORCH})
        assert torch.get_num_threads() == 1
        assert default_threads() == 1
        device.close()
    finally:
        torch.set_num_threads(before)
    for refused in (
        lambda: platform.open(platform.devices()[0], {"threads": -2}),
        lambda: platform.configured({"threads": -2}),
    ):
        with pytest.raises(ConfigError, match=r"threads must be 0 \(automatic\) or more, got -2"):
            refused()


def test_the_number_of_threads_follows_the_environment() -> None:
    code = "from cardan_cpu.device import default_threads as d; print(d())"
    for given in ("1", "64"):
        env = {"OMP_NUM_THREADS": given, "PATH": ""}
        shown = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert int(shown.stdout) == min(int(given), usable_cores())


@pytest.mark.parametrize(("given", "threads"), [("1", 1), ("3,2", 3), ("64", 4), ("", 4), ("0", 4), ("many", 4)])
def test_threads_of_native_kernels_follow_the_environment_too(
    given: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cardan_cpu.host.usable_cores", lambda _: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert compute_threads() == threads


def test_the_device_measures_and_shares_memory() -> None:
    device = CpuDevice(DeviceInfo(index=0, name="x"), threads=torch.get_num_threads())
    assert isinstance(device.memory(), Memory)
    assert isinstance(device.memory_policy(), SharedMemoryPolicy)


def facts(native: str, fmt: str, num_parameters: int) -> object:
    values = {"native_dtype": native, "weight_formats": {fmt: 9, "F32": 3}, "num_parameters": num_parameters}
    return type("Facts", (), values)()


@pytest.mark.parametrize(
    ("native", "fmt", "num_parameters", "flags", "expected"),
    [
        ("float32", "F32", 10**6, ("amx_bf16",), "float32"),
        ("bfloat16", "BF16", 10**6, ("amx_bf16",), "bfloat16"),
        ("bfloat16", "BF16", 10**6, ("avx2",), "bfloat16"),
        ("bfloat16", "Q4_1", 10**6, ("amx_bf16",), "bfloat16"),
        ("bfloat16", "Q4_1", 10**6, ("avx2",), "float32"),
        ("bfloat16", "Q4_1", 10**10, ("avx2",), "bfloat16"),
    ],
)
def test_the_recommended_type_has_its_reason(
    native: str, fmt: str, num_parameters: int, flags: tuple[str, ...], expected: str
) -> None:
    torch_alone = Choice(TORCH, "")
    model = facts(native, fmt, num_parameters)
    recommendation = _recommended_dtype(model, Host("x", flags, 2), torch_alone)  # type: ignore[arg-type]
    assert recommendation.value == expected
    assert recommendation.why


@pytest.mark.parametrize(
    ("native", "fmt", "num_parameters", "expected"),
    [
        ("float32", "F32", 10**10, "float32"),
        ("bfloat16", "BF16", 10**6, "bfloat16"),
        ("bfloat16", "Q4_1", 10**8, "float32"),
        ("bfloat16", "Q4_1", 10**10, "bfloat16"),
    ],
)
def test_native_kernels_compute_in_float32_whatever_the_type(
    native: str, fmt: str, num_parameters: int, expected: str
) -> None:
    model = facts(native, fmt, num_parameters)
    recommendation = _recommended_dtype(model, Host("x", (), 2), Choice(NATIVE, "", "avx2"))  # type: ignore[arg-type]
    assert recommendation.value == expected
    assert recommendation.why


def view(values: np.ndarray, dtype: str = "F32") -> TensorView:
    array = np.ascontiguousarray(values)
    return TensorView("w", dtype, values.shape, memoryview(array.view(np.uint8).reshape(-1)))


def spec(rows: int, columns: int, dtype: str) -> LinearSpec:
    return LinearSpec(name="layer", out_features=rows, in_features=columns, dtype=dtype)


@pytest.mark.parametrize("rows", [1, WIDEN_FROM_ROWS - 1, WIDEN_FROM_ROWS, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_widening_gives_products_that_are_rounded_once(rows: int, with_bias: bool, monkeypatch) -> None:
    monkeypatch.setattr("cardan_cpu.linear.BLOCK_ELEMENTS", 65 * 7)
    rng = np.random.default_rng(rows)
    weight = torch.from_numpy(rng.standard_normal((50, 65))).bfloat16()
    x = torch.from_numpy(rng.standard_normal((rows, 65))).bfloat16()
    bias = torch.from_numpy(rng.standard_normal(50)).float() if with_bias else None
    packed = CpuDenseLinear(has_bfloat16=False).pack([view(weight.float().numpy())], spec(50, 65, "bfloat16"), bias)
    assert isinstance(packed, WideningWeight)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.bfloat16().double())
    got = packed.apply(x)
    assert got.dtype is torch.bfloat16
    error = (got.double() - exact).abs().amax(1) / exact.abs().amax(1)
    assert error.max() <= 2**-8


def test_hardware_that_multiplies_bfloat16_is_left_to_it() -> None:
    packed = CpuDenseLinear(has_bfloat16=True).pack([view(np.ones((2, 3), np.float32))], spec(2, 3, "bfloat16"), None)
    assert not isinstance(packed, WideningWeight)


@pytest.mark.parametrize("fmt", ["F32", "F16", "BF16"])
def test_dense_views_are_joined_in_the_type_of_activations(fmt: str) -> None:
    values = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    tensor = torch.from_numpy(values).to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[fmt])
    raw = tensor.view(torch.uint8).numpy()
    views = [
        TensorView("w", fmt, (2, 4), memoryview(raw[:2].reshape(-1))),
        TensorView("w", fmt, (3, 4), memoryview(raw[2:].reshape(-1))),
    ]
    packed = DenseLinear().pack(views, spec(5, 4, "float32"), None)
    assert torch.equal(packed.weight, tensor.float())
    assert packed.num_bytes == 80
    assert torch.equal(packed.gather(torch.tensor([4, 0], dtype=torch.int32)), tensor.float()[[4, 0]])


def test_every_format_of_weights_has_an_answer() -> None:
    """Weights that no GEMM takes are widened, and the plan says why."""
    chosen = platform.configured(WITH_TORCH)
    capabilities = chosen.capabilities(chosen.devices()[0])
    for fmt in ("F32", "F16", "BF16", *(fmt for fmt, spec in FORMATS.items() if spec.quantized)):
        answer = capabilities.get(f"weights:{fmt}")
        assert answer.support is not Support.UNSUPPORTED, fmt
        assert answer.reason
    assert capabilities.get("weights:AFFINE4_64_F16").reason == "no GEMM here takes affine groups"


def test_refuses_block_formats_and_wrong_numbers_of_rows() -> None:
    method = DenseLinear()
    assert method.claims("F16", spec(2, 3, "float32")) is None
    assert "Q4_1 is a block format" in str(method.claims("Q4_1", spec(2, 3, "float32")))
    with pytest.raises(UnsupportedError, match=r"w cannot be packed for layer: Q8_0 is a block format.*Widen it first"):
        method.pack([TensorView("w", "Q8_0", (2, 32), memoryview(bytes(68)))], spec(2, 32, "float32"), None)
    with pytest.raises(UnsupportedError, match="layer needs 3 rows, but its tensors have 2"):
        method.pack([view(np.ones((2, 3), np.float32))], spec(3, 3, "float32"), None)


@pytest.mark.parametrize("kernels", [kind for kind in (NATIVE, TORCH) if choose(kind).kind is not None])
def test_a_plan_is_about_the_kernels_that_were_asked_for(tmp_path: Path, kernels: str) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    config = EngineConfig(
        model=ModelConfig(model=str(model), random_weights=0),
        platform=PlatformConfig(platform="cpu", options=(f"kernels={kernels}",)),
    )
    plan = resolve_plan(config)
    assert plan.value("decode_attention_backend") == plan.value("prefill_attention_backend") == kernels
    assert choose(kernels).name in plan.device.detail
    assert plan.platform_options["kernels"] == kernels


def test_codes_with_a_scale_for_each_head_need_the_native_kernels() -> None:
    lacks = platform.configured(WITH_TORCH).capabilities(platform.devices()[0]).get("kv_dtype:int8")
    assert lacks.support is Support.UNSUPPORTED
    assert "reads no scale for each token and head" in lacks.reason
    assert "kernels=native" in lacks.alternative
    if choose("native").kind is not None:
        there = platform.configured({"kernels": "native"}).capabilities(platform.devices()[0])
        assert there.supports("kv_dtype:int8")


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("kernels", [kind for kind in (NATIVE, TORCH) if choose(kind).kind is not None])
def test_floats_of_8_bits_hold_keys_and_values_with_either_kernels(kernels: str, dtype: str) -> None:
    assert platform.configured({"kernels": kernels}).capabilities(platform.devices()[0]).supports(f"kv_dtype:{dtype}")
