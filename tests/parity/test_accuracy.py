"""A real model keeps its quality: perplexity next to that by transformers, from the same file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cardan_native")

from runner_harness import RunnerHarness

from cardan.config import ModelConfig
from cardan.text import load_tokenizer
from cardan.weights import open_checkpoint
from cardan_cpu import platform

TEXT = Path(__file__).parents[2] / "LICENSE"
"""A text that comes with the sources and stays as it is."""

CHUNK = 160
MOST_OFF = 0.005
"""How far perplexity may be from that of transformers, and with activations of int8 from that without, as a share."""

INT8_OFF = 1 / 254
"""How far activations of int8 are off at most, as a share of the largest magnitude of those that are rounded together:
half a step of 127."""

MODELS = [
    pytest.param(("smollm2_path", 640), id="Q4_1", marks=[pytest.mark.slow, pytest.mark.model]),
    pytest.param(("coder_path", 512), id="K-quants", marks=[pytest.mark.accuracy, pytest.mark.timeout(1800)]),
]
"""The fixture that finds each, and how many tokens of the text it reads."""


@dataclass(frozen=True)
class Truth:
    """What transformers makes of the text, from weights that it dequantizes itself."""

    model: Path
    ids: list[int]
    perplexity: float


@pytest.fixture(scope="module", params=MODELS)
def by_transformers(request: pytest.FixtureRequest) -> Truth:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    fixture, tokens = request.param
    path = request.getfixturevalue(fixture)
    ids = text_ids(path, tokens)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        logits = oracle(torch.tensor([ids])).logits[0].double().numpy()
    return Truth(path, ids, perplexity(logits, ids))


def text_ids(model: Path, tokens: int) -> list[int]:
    checkpoint = open_checkpoint(ModelConfig(model=str(model)))
    ids = load_tokenizer(checkpoint.tokenizer).encode(TEXT.read_text(encoding="utf-8"))[:tokens]
    checkpoint.close()
    assert len(ids) == tokens
    return ids


def perplexity(logits: np.ndarray, ids: list[int]) -> float:
    """Of every token but the first, given those before it, from logits ``[tokens, vocab]``."""
    wide = logits[:-1].astype(np.float64)
    top = wide.max(axis=-1)
    log_sums = top + np.log(np.exp(wide - top[:, None]).sum(axis=-1))
    return float(np.exp(np.mean(log_sums - wide[np.arange(len(wide)), ids[1:]])))


@pytest.fixture(scope="module")
def by_cardan(by_transformers: Truth) -> Callable[[str, str], float]:
    """The text's perplexity with a kind of activations in a type."""

    @functools.cache
    def given(activations: str, dtype: str) -> float:
        ids = by_transformers.ids
        options = {"kernels": "native", "activations": activations}
        harness = RunnerHarness(by_transformers.model, platform, dtype, options)
        parts = [harness.logits((1, ids[start : start + CHUNK])) for start in range(0, len(ids), CHUNK)]
        harness.runner.close()
        harness.device.close()
        return perplexity(np.concatenate(parts), ids)

    return given


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activations", ["float", "int16"])
def test_perplexity_is_that_of_transformers(
    by_transformers: Truth, by_cardan: Callable[[str, str], float], activations: str, dtype: str, record_property: Any
) -> None:
    got, want = by_cardan(activations, dtype), by_transformers.perplexity
    record_property("perplexity", got)
    record_property("transformers", want)
    assert abs(got - want) <= MOST_OFF * want, f"perplexity {got:.4f}, by transformers {want:.4f}"


@pytest.mark.parametrize(("dtype", "most"), [("float32", MOST_OFF), ("bfloat16", MOST_OFF + INT8_OFF)])
def test_activations_of_int8_cost_little(
    by_transformers: Truth, by_cardan: Callable[[str, str], float], dtype: str, most: float, record_property: Any
) -> None:
    """Next to activations of the same type that are not rounded, and next to transformers.

    Next to transformers float32 is held to what holds for activations that are not rounded. In bfloat16 two roundings
    come together: what that type is granted, and what int8 rounds activations by at most, as though perplexity moved
    by as large a share as activations do. That is an allowance, not a theorem.
    """
    got, plain, want = by_cardan("int8", dtype), by_cardan("float", dtype), by_transformers.perplexity
    record_property("perplexity", got)
    record_property("float", plain)
    record_property("transformers", want)
    assert abs(got - plain) <= MOST_OFF * plain, f"perplexity {got:.4f}, with float activations {plain:.4f}"
    assert abs(got - want) <= most * want, f"perplexity {got:.4f}, by transformers {want:.4f}"
