"""The real SmolLM2 through the whole engine on the CPU platform, held to transformers in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_parity import check_layout, start

from cardan.config import ModelConfig
from cardan.engine.core import EngineCore
from cardan.engine.messages import Generate
from cardan.models import build_model
from cardan.text import Tokenizer, load_tokenizer
from cardan.types import LogprobParams, SamplingParams
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


@pytest.mark.parametrize("layout", ["odd-chunks-overlapped", "retracting-plain-pages"])
def test_answers_equal_transformers(layout: str, smollm2_path: Path, tokenizer: Tokenizer) -> None:
    texts = [*TEXTS, COMMON + "They agreed that", COMMON + "Nobody knew where the money"]
    prompts = [tokenizer.encode(text) for text in texts]
    check_layout(smollm2_path, LargeOracle(smollm2_path), layout, prompts, top=50)


def test_64_requests_over_a_pool_of_2048_tokens_answer_as_they_do_alone(
    smollm2_path: Path, tokenizer: Tokenizer
) -> None:
    prompts = [
        tokenizer.encode(f"{'All of these were counted twice. ' * (i % 5)}Number {i * 37 % 64} of the list is called")
        for i in range(64)
    ]
    core, prepared = start(smollm2_path, {"overlap": True, "chunk": 512, "pool": 2048, "rows": 64})
    try:
        together = _texts(core, dict(enumerate(prompts)), tokenizer)
        assert core.stats().totals.get("retractions", 0) > 0
        for i, prompt in enumerate(prompts):
            assert core.flush_cache()
            assert _texts(core, {i: prompt}, tokenizer)[i] == together[i], f"request {i}"
    finally:
        prepared.close()


def _texts(core: EngineCore, prompts: dict[int, list[int]], tokenizer: Tokenizer) -> dict[int, str]:
    """Greedy answers of 40 tokens."""
    tokens: dict[str, list[int]] = {str(i): [] for i in prompts}
    for i, ids in prompts.items():
        core.add(
            Generate(
                wire_id=str(i),
                prompt_ids=ids,
                sampling=SamplingParams(max_new_tokens=40, temperature=0.0),
                logprobs=LogprobParams(),
                priority=0,
                cache_salt=None,
                routing_key=None,
                arrival_s=0.0,
            )
        )
    while core.has_work:
        core.turn()
        for news in core.take_news():
            for rid, new in news.tokens():
                tokens[rid].extend(new)
    core.scheduler.check_invariants()
    assert all(len(answer) == 40 for answer in tokens.values())
    return {int(rid): tokenizer.decode(answer) for rid, answer in tokens.items()}
