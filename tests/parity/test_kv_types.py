"""A real model over keys and values of fewer bits: text that makes sense, and distributions that stay close."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cardan_native")

from runner_harness import RunnerHarness

from cardan.config import ModelConfig
from cardan.ops import round_to
from cardan.text import Tokenizer, load_tokenizer
from cardan.weights import open_checkpoint
from cardan_cpu import platform

pytestmark = [pytest.mark.slow, pytest.mark.model]

TEXT = Path(__file__).parents[2] / "LICENSE"
TOKENS = 384
CHUNK = 96
TWICE_AS_FAR = 4
"""A divergence grows with the square of what keys and values are off by; so much is left to how directions fall."""


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    checkpoint = open_checkpoint(ModelConfig(model=str(smollm2_path)))
    loaded = load_tokenizer(checkpoint.tokenizer)
    checkpoint.close()
    return loaded


def harness(path: Path, kv_dtype: str) -> RunnerHarness:
    options = {"kernels": "native", "activations": "float"}
    made = RunnerHarness(path, platform, "float32", options, kv_cache_dtype=kv_dtype)
    assert made.plan.kv_cache_dtype == kv_dtype
    return made


def read_text(made: RunnerHarness, ids: list[int]) -> np.ndarray:
    """Log-probabilities of every next token, float64; all but the first chunk read what the pool keeps."""
    parts = [made.logits((1, ids[start : start + CHUNK])) for start in range(0, TOKENS, CHUNK)]
    logits = np.concatenate(parts).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def squared(kept: np.ndarray, wanted: np.ndarray) -> float:
    return float(((kept - wanted) ** 2).sum())


def worst_ratio(made: RunnerHarness) -> float:
    """How many times as much int8 rounds off as bfloat16, squared, for the layer where that is most."""
    slots, ratios = made.slots[1], []
    for leaf in made.pool.pool.leaves():
        values = np.array(leaf.bits())[slots].astype(np.float64)
        scales = np.abs(values).max(-1, keepdims=True) / 127
        coded = np.rint(values / scales) * scales
        ratios.append(squared(coded, values) / squared(round_to(values, "bfloat16"), values))
    return max(ratios)


def test_distributions_over_int8_are_off_by_what_its_steps_explain(smollm2_path: Path, tokenizer: Tokenizer) -> None:
    """Next to bfloat16, whose own divergence is the measure."""
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:TOKENS]
    exact_run = harness(smollm2_path, "float32")
    exact = read_text(exact_run, ids)
    ratio = worst_ratio(exact_run)
    off = {}
    for kv_dtype in ("bfloat16", "int8"):
        given = read_text(harness(smollm2_path, kv_dtype), ids)
        off[kv_dtype] = float((np.exp(exact) * (exact - given)).sum(-1).mean())
    assert 0 < off["bfloat16"] < off["int8"] <= TWICE_AS_FAR * ratio * off["bfloat16"], (off, ratio)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_greedy_text_over_eight_bits_makes_sense(smollm2_path: Path, tokenizer: Tokenizer, kv_dtype: str) -> None:
    made = harness(smollm2_path, kv_dtype)
    ids = tokenizer.encode("The capital of France is")
    out: list[int] = []
    new = ids
    while len(out) < 12:
        out.append(int(made.logits((1, new))[-1].argmax()))
        new = out[-1:]
    assert "Paris" in tokenizer.decode(out), tokenizer.decode(out)
