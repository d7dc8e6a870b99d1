"""Hidden states that requests ask for, and prompts that are given as vectors, held to transformers'."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig
from cardan.engine import Engine, Frontend
from cardan.engine.api import GenerateOutput, GenerateRequest
from cardan.errors import RequestError
from cardan.types import FinishKind, LogprobParams, SamplingParams

PROMPTS = [[5, 9, 17, 33], [5, 9, 17, 40, 41, 42], [60], list(range(3, 43))]
OPTIONS: dict[str, Any] = {"cpu": ("activations=float",), "mlx": ("device=cpu",)}


def sampling(count: int = 8, **changes: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0.0, **{"ignore_eos": True, **changes})


def config(model: Path, platform: str, options: tuple[str, ...] = (), pool: int = 512, **changes: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), dtype="float32"),
        platform=PlatformConfig(platform=platform, options=options),
        cache=CacheConfig(max_total_tokens=pool),
        scheduler=SchedulerConfig(chunked_prefill_size=16, random_seed=1, enable_return_hidden_states=True, **changes),
    )


async def run(engine: Frontend, **fields: Any) -> tuple[list[int], np.ndarray[Any, Any], GenerateOutput]:
    """Tokens, hidden states, and the last output of a request."""
    outputs = [output async for output in engine.generate(GenerateRequest(**fields))]
    states = [np.frombuffer(state, np.float32) for output in outputs for state in output.hidden_states]
    assert outputs[-1].finish_reason is not None
    assert outputs[-1].finish_reason.kind is FinishKind.LENGTH, outputs[-1].finish_reason
    return [token for output in outputs for token in output.token_ids], np.array(states), outputs[-1]


@pytest.mark.parametrize("plain", [False, True])
async def test_each_token_but_the_last_has_one(tiny_model: Path, plain: bool) -> None:
    """Over chunks, cached prefixes, batches and a pool so small that requests are retracted."""
    settings = config(tiny_model, "null", pool=160, disable_overlap_schedule=plain, schedule_conservativeness=0.01)
    async with await Frontend.start(settings) as engine:
        alone = [
            await run(engine, input_ids=tuple(ids), sampling=sampling(30, ignore_eos=False), hidden_states=True)
            for ids in PROMPTS
        ]
        for (tokens, states, last), ids in zip(alone, PROMPTS, strict=True):
            assert len(states) == len(ids) + len(tokens) - 1
            assert last.cached_tokens == 0, "of what comes from the cache nothing is known"
        for _ in range(2):
            together = await asyncio.gather(
                *(
                    run(engine, input_ids=tuple(ids), sampling=sampling(30, ignore_eos=False), hidden_states=True)
                    for ids in PROMPTS
                ),
                *(run(engine, input_ids=(7, number), sampling=sampling(25, ignore_eos=False)) for number in range(3)),
            )
            for (tokens, states, _), (wanted, expected, _) in zip(together, alone, strict=False):
                assert tokens == wanted
                assert (states == expected).all()
            assert all(not len(states) for _, states, _ in together[len(PROMPTS) :])
        stats = await engine.stats()
        assert stats.totals["retractions"] > 0


async def test_they_come_with_streams_that_are_read_late(tiny_model: Path) -> None:
    async with await Frontend.start(config(tiny_model, "null")) as engine:
        stream = engine.generate(GenerateRequest(input_ids=(5, 6), sampling=sampling(6), hidden_states=True))
        first = await anext(stream)
        await asyncio.sleep(0.3)
        rest = [output async for output in stream]
        assert len(rest) == 1, "news that were not taken come joined"
        assert len(first.hidden_states) + len(rest[0].hidden_states) == 2 + 6 - 1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    """Families that scale what they embed, before or after it may be given, and one that does not."""
    folders: dict[str, Path] = {}
    for family in ("llama", "granite", "gemma2"):
        folders[family] = tiny_models.make_tiny(family, tmp_path_factory.mktemp(family))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_model / name, folders[family] / name)
    return folders


def transformers_states(model: Any, **inputs: Any) -> np.ndarray[Any, Any]:
    import torch

    with torch.no_grad():
        states: np.ndarray[Any, Any] = model(**inputs).last_hidden_state[0].double().numpy()
    return states


@pytest.mark.parametrize("platform", ["cpu", "mlx"])
@pytest.mark.parametrize(
    "family", ["llama", pytest.param("granite", marks=pytest.mark.slow), pytest.param("gemma2", marks=pytest.mark.slow)]
)
async def test_they_are_transformers(models: dict[str, Path], family: str, platform: str) -> None:
    pytest.importorskip("mlx.core" if platform == "mlx" else "torch")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(models[family], dtype=torch.float32).eval()
    options = OPTIONS[platform] if platform == "cpu" else ()
    async with await Frontend.start(config(models[family], platform, options)) as engine:
        answers = await asyncio.gather(
            *(run(engine, input_ids=tuple(ids), sampling=sampling(), hidden_states=True) for ids in PROMPTS)
        )
        for ids, (tokens, states, _) in zip(PROMPTS, answers, strict=True):
            expected = transformers_states(model, input_ids=torch.tensor([[*ids, *tokens[:-1]]]))
            assert states == pytest.approx(expected, abs=5e-5)
        # What the embedding layer gives for the same ids, and then something that no id stands for.
        table = model.get_input_embeddings()
        generator = torch.Generator().manual_seed(3)
        for ids, (tokens, states, _) in zip(PROMPTS, answers, strict=True):
            embeds = table(torch.tensor([ids])).detach()
            again, same, last = await run(
                engine, input_embeds=embeds[0].numpy(), sampling=sampling(), hidden_states=True
            )
            assert again == tokens
            assert same == pytest.approx(states, abs=5e-5)
            assert last.cached_tokens == 0
            noisy = embeds + embeds.std() * torch.randn(embeds.shape, generator=generator)
            _, other, _ = await run(engine, input_embeds=noisy[0].numpy(), sampling=sampling(1), hidden_states=True)
            assert other == pytest.approx(transformers_states(model, inputs_embeds=noisy), abs=5e-5)
            assert not np.allclose(other, states[: len(ids)], atol=1e-2)


async def test_vectors_share_no_prefix(tiny_model: Path) -> None:
    """Neither with token ids, which stand for nothing beside vectors, nor with each other."""
    async with await Frontend.start(config(tiny_model, "null")) as engine:
        width = engine.info.hidden_size
        ids_alone = await run(engine, input_ids=(0,) * 40, sampling=sampling())
        first, second = (np.full((40, width), value, np.float32) for value in (0.0, 1.0))
        found = []
        for vectors in (first, second, first):
            tokens, _, last = await run(engine, input_embeds=vectors, sampling=sampling(40))
            assert last.cached_tokens == 0
            assert last.prompt_tokens == 40
            found.append(tokens)
        assert found[0] == found[2] != found[1]
        tokens, _, last = await run(engine, input_ids=(0,) * 40, sampling=sampling())
        assert (tokens, last.cached_tokens) == (ids_alone[0], 39)
        assert await engine.flush_cache()
        assert (await engine.stats()).used_tokens == 0


async def test_vectors_have_no_ids_to_be_penalized(tiny_model: Path) -> None:
    """Of a prompt of vectors no token counts as repeated, though its places hold some id."""
    async with await Frontend.start(config(tiny_model, "null")) as engine:
        vectors = np.ones((3, engine.info.hidden_size), np.float32)
        only_zero = sampling(1, logit_bias={0: 1e5, 1: 1e5})
        plain, _, _ = await run(engine, input_embeds=vectors, sampling=only_zero)
        penalized, _, _ = await run(
            engine, input_embeds=vectors, sampling=sampling(1, logit_bias={0: 1e5, 1: 1e5}, repetition_penalty=2.0)
        )
        assert penalized == plain


async def test_what_is_wrong_with_vectors_is_told(tiny_model: Path) -> None:
    async with await Frontend.start(config(tiny_model, "null")) as engine:
        width = engine.info.hidden_size
        good = np.ones((2, width), np.float32)
        bad = good.copy()
        bad[1, 3] = np.inf
        cases: list[tuple[dict[str, Any], str]] = [
            ({"input_embeds": good[:, :-1]}, f"must have the shape \\[tokens, {width}\\].*got \\[2, {width - 1}\\]"),
            ({"input_embeds": bad}, "finite float32 numbers, got inf at \\[1\\]\\[3\\]"),
            ({"input_embeds": good, "input_ids": (1,)}, "one of text, input_ids and input_embeds, got input_ids and"),
            ({"input_embeds": good, "logprobs": LogprobParams(prompt_start=0)}, "Logprobs of a prompt need its token"),
            ({}, "got none of them"),
        ]
        for fields, message in cases:
            with pytest.raises(RequestError, match=message):
                await anext(engine.generate(GenerateRequest(sampling=sampling(), **fields)))


def test_the_offline_engine_gives_lists(tiny_model: Path) -> None:
    with Engine(config=config(tiny_model, "null")) as engine:
        greedy = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
        answer = engine.generate(input_ids=[5, 6], sampling_params=greedy, return_hidden_states=True)
        prompt, *decoded = answer["meta_info"]["hidden_states"]
        assert [len(prompt), len(decoded)] == [2, 2]
        assert all(len(vector) == len(prompt[0]) for vector in (*prompt, *decoded))
        width = engine.get_server_info()["hidden_size"]
        vectors = np.ones((2, width))
        one = engine.generate(input_embeds=vectors.tolist(), sampling_params=greedy)
        many = engine.generate(input_embeds=[vectors, vectors.tolist()], sampling_params=greedy)
        assert [item["output_ids"] for item in many] == [one["output_ids"]] * 2
        for wrong, message in (
            ([[1.0], [1.0, 2.0]], "theirs differ"),
            ([1.0, 2.0], r"got shape \[2\] of float64"),
            ([["1"]], "got something else"),
            ([[True]], "of bool"),
            ([], "at least one vector"),
            ([[]], "at least one vector"),
        ):
            with pytest.raises(RequestError, match=message):
                engine.generate(input_embeds=wrong, sampling_params=greedy)


async def test_they_are_off_unless_the_server_was_told(tiny_model: Path) -> None:
    settings = EngineConfig(
        model=ModelConfig(model=str(tiny_model)),
        platform=PlatformConfig(platform="null"),
        cache=CacheConfig(max_total_tokens=512),
    )
    async with await Frontend.start(settings) as engine:
        with pytest.raises(RequestError, match="--enable-return-hidden-states") as caught:
            await anext(engine.generate(GenerateRequest(input_ids=(1,), hidden_states=True)))
        assert caught.value.code == "feature_not_enabled"
