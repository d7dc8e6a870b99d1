"""A checkpoint's scales of keys and values, from its file to the logits.

Powers of two change no digit of a float. So a model whose keys are 4,096 times as large and whose values are a million
times smaller, with what undoes both in its queries and outputs and with scales that say so, gives what the plain model
gives.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import quantized_checkpoints as made
from runner_harness import RunnerHarness

from cardan_cpu import platform
from cardan_cpu.kernels import NATIVE, TORCH, choose

KERNELS = [kind for kind in (NATIVE, TORCH) if choose(kind).kind is not None]
FACTORS = {"q_proj": 2.0**-12, "k_proj": 2.0**12, "v_proj": 2.0**-20, "o_proj": 2.0**20}
SCALES = {"k_scale": 2.0**12, "v_scale": 2.0**-20}
IDS = [5, 80, 17, 33, 2, 64, 9, 71, 40, 12]


def values() -> made.Tensors:
    rng = np.random.default_rng(3)
    drawn = {}
    for name, shape in made.shapes().items():
        if len(shape) == 1:
            drawn[name] = np.ones(shape, np.float32)
        else:
            drawn[name] = (rng.normal(size=shape) * 1.5 / shape[-1] ** 0.5).astype(np.float32)
    return drawn


def stretched(plain: made.Tensors) -> made.Tensors:
    changed = {}
    for name, value in plain.items():
        factor = next((factor for part, factor in FACTORS.items() if part in name), 1.0)
        changed[name] = value * np.float32(factor)
    return changed


def scales() -> made.Tensors:
    return {
        f"model.layers.{layer}.self_attn.{name}": np.float32(scale)
        for layer in range(made.LAYERS)
        for name, scale in SCALES.items()
    }


def logits(folder: Path, tensors: made.Tensors, kernels: str, kv_dtype: str) -> np.ndarray:
    """Of a prompt in two parts, and of a decode step."""
    made.write_dense(folder, {})
    made.save(folder / "model.safetensors", tensors)
    chosen = platform.configured({"kernels": kernels})
    harness = RunnerHarness(folder, chosen, "float32", {"kernels": kernels}, kv_cache_dtype=kv_dtype)
    parts = [harness.logits((1, IDS[:6])), harness.logits((1, IDS[6:9])), harness.logits((1, IDS[9:]))]
    harness.runner.close()
    harness.device.close()
    return np.concatenate(parts)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_scales_make_up_for_the_size_of_keys_and_values(tmp_path: Path, kernels: str, kv_dtype: str) -> None:
    plain = values()
    changed = stretched(plain)
    want = logits(tmp_path / "plain", plain, kernels, kv_dtype)
    got = logits(tmp_path / "scaled", {**changed, **scales()}, kernels, kv_dtype)
    np.testing.assert_array_equal(got, want)
    without = logits(tmp_path / "without", changed, kernels, kv_dtype)
    assert np.abs(without - want).max() > 0.1 * np.abs(want).max()


@pytest.mark.parametrize("kernels", KERNELS)
def test_other_types_of_keys_and_values_use_no_scales(tmp_path: Path, kernels: str) -> None:
    changed = stretched(values())
    want = logits(tmp_path / "without", changed, kernels, "float32")
    np.testing.assert_array_equal(logits(tmp_path / "with", {**changed, **scales()}, kernels, "float32"), want)
