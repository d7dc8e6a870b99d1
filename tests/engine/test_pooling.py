"""Hidden states that stand for a prompt, held to transformers' and to each other over chunks, batches and the cache."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig
from cardan.engine import Frontend
from cardan.engine.api import GenerateRequest
from cardan.errors import RequestError
from cardan.types import FinishKind, Pooling, SamplingParams

NO_TOKEN = SamplingParams(max_new_tokens=0, temperature=0.0)
PROMPTS = [[5, 9, 17, 33], [5, 9, 17, 40, 41, 42], [60], list(range(3, 60))]


def config(model: Path, platform: str, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), dtype="float32"),
        platform=PlatformConfig(platform=platform, **options),
        cache=CacheConfig(max_total_tokens=512),
        scheduler=SchedulerConfig(chunked_prefill_size=16, random_seed=1),
    )


async def pooled(engine: Frontend, ids: list[int], pooling: Pooling) -> tuple[np.ndarray[Any, Any], int]:
    request = GenerateRequest(input_ids=tuple(ids), sampling=NO_TOKEN, pooling=pooling)
    outputs = [output async for output in engine.generate(request)]
    assert outputs[-1].finish_reason is not None
    assert outputs[-1].finish_reason.kind is FinishKind.LENGTH, outputs[-1].finish_reason
    assert all(not output.token_ids for output in outputs)
    return np.asarray(outputs[-1].embedding), outputs[-1].cached_tokens


async def test_a_mean_is_that_of_all_prefixes(tiny_model: Path) -> None:
    async with await Frontend.start(config(tiny_model, "null")) as engine:
        ids = PROMPTS[3]
        last = [(await pooled(engine, ids[: n + 1], Pooling.LAST))[0] for n in range(len(ids))]
        again, cached = await pooled(engine, ids, Pooling.LAST)
        assert cached == len(ids) - 1
        assert (again == last[-1]).all()
        for _ in range(2):
            mean, cached = await pooled(engine, ids, Pooling.MEAN)
            assert cached == 0, "a mean needs the hidden states of all tokens"
            assert mean == pytest.approx(np.mean(last, axis=0))
        together = await asyncio.gather(*(pooled(engine, prompt, Pooling.MEAN) for prompt in PROMPTS))
        alone = [await pooled(engine, prompt, Pooling.MEAN) for prompt in PROMPTS]
        for (one, _), (other, _) in zip(together, alone, strict=True):
            assert one == pytest.approx(other)


async def test_a_token_cannot_be_had_as_well(tiny_model: Path) -> None:
    async with await Frontend.start(config(tiny_model, "null")) as engine:
        for sampling in (SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=0, n=2)):
            request = GenerateRequest(input_ids=(5,), sampling=sampling, pooling=Pooling.LAST)
            with pytest.raises(RequestError, match="asks for one hidden state and no token"):
                await anext(engine.generate(request))


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder: Path = tiny_models.make_tiny("llama", tmp_path_factory.mktemp("llama"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, folder / name)
    return folder


async def test_they_are_transformers_hidden_states(tiny_llama: Path) -> None:
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(tiny_llama, dtype=torch.float32).eval()

    def expected(ids: list[int]) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            states: np.ndarray[Any, Any] = model(torch.tensor([ids])).last_hidden_state[0].double().numpy()
        return states

    async with await Frontend.start(config(tiny_llama, "cpu", options=("activations=float",))) as engine:
        for _ in range(2):  # the second time from cached prefixes, where they may be used
            for ids in PROMPTS:
                states = expected(ids)
                last, _ = await pooled(engine, ids, Pooling.LAST)
                mean, cached = await pooled(engine, ids, Pooling.MEAN)
                assert last == pytest.approx(states[-1], abs=2e-5)
                assert mean == pytest.approx(states.mean(axis=0), abs=2e-5)
                assert cached == 0
