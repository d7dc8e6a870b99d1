"""Checkpoints of every quantization method on a runner, against the same weights as float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from quantized_checkpoints import METHODS, VOCAB, write, write_dense
from runner_harness import RunnerHarness

from cardan.config import EngineConfig, ModelConfig, PlatformConfig
from cardan.engine.preparation import resolve_plan
from cardan.errors import UnsupportedError
from cardan.platform.api import Platform
from cardan_cpu import platform as cpu_platform

IDS = [1, 17, 4, 80, 33, 9, 61, 2, 45, 45, 7]
NATIVE = {"kernels": "native", "activations": "float"}
TORCH = {"kernels": "torch"}
QUICK = ("awq-128", "gptq4-act-order", "fp8-blocks", "ct-w8a8", "mxfp4")
"""One of each kind; the others run with the slow tests."""
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]


def harness(folder: Path, chosen: Platform, options: dict[str, str], **settings: object) -> RunnerHarness:
    return RunnerHarness(folder, chosen.configured(options), options=dict(options), **settings)


def chosen_platform(kind: str) -> tuple[Platform, dict[str, str]]:
    if kind == "mlx":
        pytest.importorskip("mlx.core")
        from cardan_mlx import platform as mlx_platform

        return mlx_platform, {}
    pytest.importorskip("cardan_native" if kind == "native" else "torch")
    return cpu_platform, NATIVE if kind == "native" else TORCH


@pytest.mark.parametrize("kind", ["native", "torch", "mlx"])
@pytest.mark.parametrize("name", EVERY)
def test_a_quantized_model_gives_what_its_values_give(tmp_path: Path, name: str, kind: str) -> None:
    chosen, options = chosen_platform(kind)
    values = write(tmp_path / "quantized", METHODS[name])
    dense = write_dense(tmp_path / "dense", values)
    got = harness(tmp_path / "quantized", chosen, options)
    want = harness(dense, chosen, options)
    logits, expected = got.logits((0, IDS)), want.logits((0, IDS))
    assert logits.shape == (len(IDS), VOCAB)
    # float32 sums in another order; weights are equal
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    assert got.generate(1, IDS, 12) == want.generate(1, IDS, 12)


@pytest.mark.parametrize("name", ["awq-64", "gptq8-128-sym", "gptq4-act-order", "fp8-tensor-static", "mxfp4"])
def test_native_kernels_take_the_formats_as_they_are(tmp_path: Path, name: str) -> None:
    pytest.importorskip("cardan_native")
    write(tmp_path / "m", METHODS[name])
    loaded = harness(tmp_path / "m", cpu_platform, NATIVE, quantization_fallback="refuse")
    assert not [note for note in loaded.loaded.notes if "widened" in note]
    assert all(item.native for item in loaded.plan.formats)
    dense = harness(write_dense(tmp_path / "dense", write(tmp_path / "n", METHODS[name])), cpu_platform, NATIVE)
    assert loaded.loaded.weight_bytes < 0.6 * dense.loaded.weight_bytes


def test_the_plan_says_the_method_and_what_happens_to_each_format(tmp_path: Path) -> None:
    pytest.importorskip("cardan_native")
    write(tmp_path / "m", METHODS["ct-w8a8"])
    model = ModelConfig(model=str(tmp_path / "m"))
    shown = {}
    for kernels in ("native", "torch"):
        asked = PlatformConfig(platform="cpu", options=(f"kernels={kernels}",))
        plan = resolve_plan(EngineConfig(model=model, platform=asked))
        assert any(note.startswith("the checkpoint is quantized: compressed-tensors, int8") for note in plan.notes)
        shown[kernels] = next(item for item in plan.formats if item.fmt == "INT8_128_F32_A8")
    assert shown["native"].native
    assert shown["native"].why.endswith("activations as the option says, which is nearer to them than the format asks")
    assert shown["torch"].why == "widened at load: no GEMM here takes groups with a scale"
    assert {item.tensors for item in shown.values()} == {13}


def test_columns_in_act_order_stay_quantized(tmp_path: Path) -> None:
    pytest.importorskip("cardan_native")
    write(tmp_path / "m", METHODS["gptq4-act-order"])
    notes = harness(tmp_path / "m", cpu_platform, NATIVE).loaded.notes
    assert any("linears have columns in act-order; activations are brought into it" in note for note in notes)
    assert any("kept in parts because their formats or orders differ" in note for note in notes)


@pytest.mark.parametrize("name", ["awq-64", "ct-w8a8", "mxfp4"])
def test_what_no_kernel_takes_is_widened_or_refused(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch")
    write(tmp_path / "m", METHODS[name])
    loaded = harness(tmp_path / "m", cpu_platform, TORCH)
    assert any("13 tensors" in note and "widened to float32 at load" in note for note in loaded.loaded.notes)
    with pytest.raises(UnsupportedError, match=r"--quantization-fallback refuse forbids to widen them: .*13 tensors"):
        harness(tmp_path / "m", cpu_platform, TORCH, quantization_fallback="refuse")
