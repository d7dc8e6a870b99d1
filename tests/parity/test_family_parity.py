"""Every model family through the whole engine on the CPU platform, held to transformers in float32.

Chunks of odd sizes, prefix hits, batch mates of other lengths, retractions, mixed passes and both loops must not
change an answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from engine_parity import LAYOUTS, check_layout, check_small_pool

CONTEXT = 160


class TinyOracle:
    """Float32 logits of one tiny checkpoint by transformers."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder)
        model_class = getattr(transformers, config.architectures[0])
        self._model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def logits(self, ids: list[int]) -> np.ndarray[Any, Any]:
        """Logits at every position, ``[len(ids), vocab]``."""
        import torch

        with torch.no_grad():
            logits: np.ndarray[Any, Any] = self._model(input_ids=torch.tensor([ids])).logits[0].double().numpy()
        return logits


def prompts() -> list[list[int]]:
    """Prompts of many lengths, some of which share a prefix."""
    rng = np.random.default_rng(1)
    common = rng.integers(3, tiny_models.VOCAB, 37).tolist()
    alone = [rng.integers(3, tiny_models.VOCAB, n).tolist() for n in (1, 2, 3, 8, 17, 31, 40, 63)]
    sharing = [common + rng.integers(3, tiny_models.VOCAB, n).tolist() for n in (1, 2, 5, 21)]
    return alone + sharing


class Made(dict[str, tuple[Path, TinyOracle]]):
    """Checkpoints by family, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, family: str) -> tuple[Path, TinyOracle]:
        path = tiny_models.make_tiny(family, self._folder / family, context=CONTEXT)
        self[family] = path, TinyOracle(path)
        return self[family]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("layout", ["odd-chunks-overlapped", "retracting"])
@pytest.mark.parametrize("family", sorted(tiny_models.FAMILIES))
def test_family(family: str, layout: str, checkpoints: Made) -> None:
    check_layout(*checkpoints[family], layout, prompts(), top=tiny_models.VOCAB)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"odd-chunks-overlapped", "retracting"}))
def test_layout(family: str, layout: str, checkpoints: Made) -> None:
    check_layout(*checkpoints[family], layout, prompts(), top=tiny_models.VOCAB)


@pytest.mark.parametrize("family", ["qwen3"])
def test_64_requests_over_a_small_pool_answer_as_they_do_alone(family: str, checkpoints: Made) -> None:
    rng = np.random.default_rng(2)
    folder, _ = checkpoints[family]
    lengths = 20 + np.arange(64) % 40
    check_small_pool(folder, [rng.integers(3, tiny_models.VOCAB, n).tolist() for n in lengths], num_tokens=64)
