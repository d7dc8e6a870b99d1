"""The real SmolLM2 from one GGUF file on MLX and on the CPU platform: the same greedy tokens in float32."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def greedy_tokens():
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    import greedy_tokens

    sys.path.remove(folder)
    return greedy_tokens


def test_recorded_tokens_are_those_of_the_cpu_platform(smollm2_path, greedy_tokens):
    pytest.importorskip("torch")
    module = greedy_tokens
    got = module.continue_greedily("cpu", str(smollm2_path), module.PROMPTS, module.TOKENS)
    assert module.compare(got, module.recorded())["passed"]


@pytest.mark.timeout(1800)
def test_greedy_tokens_are_those_of_the_cpu_platform(smollm2_path, greedy_tokens):
    pytest.importorskip("mlx.core")
    module = greedy_tokens
    got = module.continue_greedily("mlx", str(smollm2_path), module.PROMPTS, module.TOKENS)
    found = module.compare(got, module.recorded())
    assert found["passed"], found["parted"]
