"""The real SmolLM2 through the whole engine on the CPU platform, held to transformers in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_parity import check_layout, check_small_pool

from cardan.config import ModelConfig
from cardan.models import build_model
from cardan.text import Tokenizer, load_tokenizer
from cardan.weights import open_checkpoint

pytestmark = pytest.mark.model

TEXTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "The three laws of motion, stated by Newton in 1687, are the following. First,",
    "Question: What do bees make?\nAnswer:",
)
COMMON = "The committee met on Tuesday to discuss the budget of the library for the coming year. "


class LargeOracle:
    """SmolLM2's logits by transformers, from the exact weights of its file."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        checkpoint = open_checkpoint(ModelConfig(model=str(path)))
        model = build_model(checkpoint.config, checkpoint.name, checkpoint.tensor_info())
        config = LlamaConfig(**checkpoint.config, attn_implementation="eager")
        with torch.device("meta"):
            self._model = LlamaForCausalLM(config)
        tensors = {
            name: torch.tensor(checkpoint.dequantize(checkpoint.tensor(name))) for name in model.expected_tensors()
        }
        self._model.load_state_dict(tensors, strict=False, assign=True)
        self._model.tie_weights()
        self._model.model.rotary_emb = type(self._model.model.rotary_emb)(config)
        self._model.eval()
        checkpoint.close()

    def logits(self, ids: list[int]) -> np.ndarray[Any, Any]:
        """Logits at every position, ``[len(ids), vocab]``."""
        import torch

        with torch.no_grad():
            logits: np.ndarray[Any, Any] = self._model(input_ids=torch.tensor([ids])).logits[0].double().numpy()
        return logits


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Iterator[Tokenizer]:
    checkpoint = open_checkpoint(ModelConfig(model=str(smollm2_path)))
    yield load_tokenizer(checkpoint.tokenizer)
    checkpoint.close()


@pytest.mark.parametrize(
    "layout", [pytest.param("odd-chunks-overlapped", marks=pytest.mark.slow), "retracting-plain-pages"]
)
def test_answers_equal_transformers(layout: str, smollm2_path: Path, tokenizer: Tokenizer) -> None:
    texts = [*TEXTS, COMMON + "They agreed that", COMMON + "Nobody knew where the money"]
    prompts = [tokenizer.encode(text) for text in texts]
    check_layout(smollm2_path, LargeOracle(smollm2_path), layout, prompts, top=50)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_64_requests_over_a_pool_of_2048_tokens_answer_as_they_do_alone(
    smollm2_path: Path, tokenizer: Tokenizer
) -> None:
    lead = "All of these were counted twice. "
    texts = [f"{lead * (i % 5)}Number {i * 37 % 64} of the list is called" for i in range(64)]
    check_small_pool(smollm2_path, [tokenizer.encode(text) for text in texts], num_tokens=40)
