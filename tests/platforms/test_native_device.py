"""The CPU device of the native kernels: no torch, its threads and memory, what it offers, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

cn = pytest.importorskip("cardan_native")

from cardan.errors import ConfigError, UnsupportedError  # noqa: E402
from cardan.platform import DeviceInfo, Evidence, Feature, Memory, SharedMemoryPolicy  # noqa: E402
from cardan.types import KVLayout, LayerKV  # noqa: E402
from cardan_cpu import platform  # noqa: E402
from cardan_cpu.features import native_features  # noqa: E402
from cardan_cpu.kernels import VERIFIED, choose, require  # noqa: E402
from cardan_cpu.native_attention import NativeAttention  # noqa: E402
from cardan_cpu.native_device import NativeDevice  # noqa: E402

INFO = DeviceInfo(index=0, name="some processor")
LAYOUT = KVLayout(
    layers=(LayerKV(index=0, q_heads=2, kv_heads=1, k_dim=8, v_dim=8, scale=1.0),), page_size=1, dtype="float32"
)


@pytest.fixture(params=cn.available())
def device(request: pytest.FixtureRequest) -> Any:
    opened = NativeDevice(INFO, threads=2, variant=request.param)
    yield opened
    opened.close()


def test_opening_the_platform_imports_no_torch() -> None:
    program = (
        "import sys, numpy as np, cardan_cpu as c\n"
        "device = c.platform.open(c.platform.devices()[0], {'threads': 1, 'kernels': 'native'})\n"
        "c.platform.capabilities(device.info)\n"
        "x = device.ops.from_host(np.ones((2, 3), np.float32))\n"
        "assert device.fetch([device.ops.add(x, x)]).wait()[0].tolist() == [[2.0] * 3] * 2\n"
        "device.close()\n"
        "assert not {'torch', 'cardan_torch'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_native_kernels_are_taken_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARDAN_ISA", raising=False)
    assert choose("native").variant == cn.available()[-1]
    asked = platform.configured({"kernels": "native"})
    assert asked.probe().reason.startswith("cardan-native is installed, for ")
    assert f"native kernels ({cn.available()[-1]})" in asked.devices()[0].detail


def test_the_variant_that_the_environment_names_is_shown_and_one_that_cannot_run_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CARDAN_ISA", "portable")
    assert "native kernels (portable)" in platform.configured({"kernels": "native"}).devices()[0].detail
    monkeypatch.setenv("CARDAN_ISA", "abacus")
    with pytest.raises(ConfigError, match=r"kernels=native cannot be used here: .*CARDAN_ISA must name a variant"):
        require("native")


@pytest.mark.parametrize("variant", cn.available())
def test_every_feature_is_answered(variant: str) -> None:
    features = native_features(variant)
    for feature in Feature:
        assert features[str(feature)].reason
    assert {answer.evidence for answer in features.values()} == {VERIFIED[variant]}


def test_a_variant_that_no_test_has_run_claims_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cardan_cpu.features.VERIFIED", {})
    assert {answer.evidence for answer in native_features("portable").values()} == {Evidence.NONE}


def test_threads_are_honoured_and_let_go(device: NativeDevice) -> None:
    native = device.ops.native
    assert device.threads == native.threads() == 2
    device.close()
    assert native.threads() == 1


def test_memory_is_shared_with_others(device: NativeDevice) -> None:
    assert isinstance(device.memory(), Memory)
    assert isinstance(device.memory_policy(), SharedMemoryPolicy)
    assert device.info is INFO


def test_attention_is_made_by_its_name_only(device: NativeDevice) -> None:
    pool = device.allocate_kv(LAYOUT, 16, 2, 8)
    assert isinstance(device.attention("native", pool, LAYOUT, "float32"), NativeAttention)
    with pytest.raises(UnsupportedError, match=r"must be native on some processor.*got 'torch'. Pass --attention-back"):
        device.attention("torch", pool, LAYOUT, "float32")


def test_what_activations_are_rounded_to_is_honoured() -> None:
    (option,) = (option for option in platform.options() if option.name == "activations")
    assert option.choices == ("auto", "float", "int16", "int8")
    for activations in option.choices:
        opened = platform.open(INFO, {"threads": 1, "kernels": "native", "activations": activations})
        (linear,) = opened.linear_methods()
        assert linear.activations == activations
        opened.close()


def test_fetched_arrays_are_copies(device: NativeDevice) -> None:
    ops = device.ops
    x = ops.from_host(np.zeros(3, np.float32))
    fetched = device.fetch((x, ops.from_host(np.array([True, False]))))
    ops.scatter_rows(x, ops.from_host(np.array([1], np.int32)), ops.from_host(np.ones(1, np.float32)))
    values, flags = fetched.wait()
    np.testing.assert_array_equal(values, [0, 0, 0])
    assert flags.dtype == np.bool_


@pytest.mark.parametrize(
    ("array", "dtype", "arrives"),
    [
        (np.array([1.5, -2.0]), None, "float32"),
        (np.array([1, 2], np.int64), None, "int32"),
        (np.array([1.5, -2.0], np.float16), None, "float16"),
        (np.array([1.5, -2.0], np.float32), "bfloat16", "bfloat16"),
        (np.array([1.5, -2.0], np.float32), "float16", "float16"),
        (np.array([1, 0], np.int32), "float32", "float32"),
        (np.array([1, 0], np.int32), "bool", "bool"),
    ],
)
def test_host_arrays_arrive_in_the_type_asked_for(
    device: NativeDevice, array: np.ndarray, dtype: str | None, arrives: str
) -> None:
    x = device.ops.from_host(array, dtype)
    assert x.dtype == arrives
    np.testing.assert_array_equal(device.ops.to_host(x).astype(np.float64), array.astype(np.float64))
