"""A real model keeps its quality: perplexity next to that by transformers, from the same file."""

from __future__ import annotations

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

pytestmark = [pytest.mark.slow, pytest.mark.model]

TEXT = Path(__file__).parents[2] / "LICENSE"
"""A text that comes with the sources and stays as it is."""

TOKENS = 640
CHUNK = 160
MOST_OFF = 0.005
"""How far perplexity may be from that of transformers, as a share."""


@pytest.fixture(scope="module")
def by_transformers(smollm2_path: Path) -> tuple[list[int], float]:
    """Token ids of the text, and its perplexity by transformers from weights that it dequantizes itself."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    ids = text_ids(smollm2_path)
    with torch.no_grad():
        logits = oracle(torch.tensor([ids])).logits[0].double().numpy()
    return ids, perplexity(logits, ids)


def text_ids(model: Path) -> list[int]:
    checkpoint = open_checkpoint(ModelConfig(model=str(model)))
    ids = load_tokenizer(checkpoint.tokenizer).encode(TEXT.read_text(encoding="utf-8"))[:TOKENS]
    checkpoint.close()
    assert len(ids) == TOKENS
    return ids


def perplexity(logits: np.ndarray, ids: list[int]) -> float:
    """Of every token but the first, given those before it, from logits ``[tokens, vocab]``."""
    wide = logits[:-1].astype(np.float64)
    top = wide.max(axis=-1)
    log_sums = top + np.log(np.exp(wide - top[:, None]).sum(axis=-1))
    return float(np.exp(np.mean(log_sums - wide[np.arange(len(wide)), ids[1:]])))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activations", ["float", "int16"])
def test_perplexity_is_that_of_transformers(
    smollm2_path: Path, by_transformers: tuple[list[int], float], activations: str, dtype: str, record_property: Any
) -> None:
    ids, want = by_transformers
    harness = RunnerHarness(smollm2_path, platform, dtype, {"kernels": "native", "activations": activations})
    parts = [harness.logits((1, ids[start : start + CHUNK])) for start in range(0, TOKENS, CHUNK)]
    harness.runner.close()
    harness.device.close()
    got = perplexity(np.concatenate(parts), ids)
    record_property("perplexity", got)
    record_property("transformers", want)
    assert abs(got - want) <= MOST_OFF * want, f"perplexity {got:.4f}, by transformers {want:.4f}"
