"""Teacher forcing: output tokens that were given are run through every step, and logprobs stay the model's own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig
from cardan.engine import Frontend
from cardan.engine.api import GenerateRequest
from cardan.engine.core import EngineCore
from cardan.engine.messages import Generate
from cardan.engine.preparation import prepare
from cardan.engine.validation import RequestLimits, check_request
from cardan.errors import RequestError
from cardan.grammar_spec import GrammarKind, GrammarSpec
from cardan.types import FinishKind, LogprobParams, SamplingParams

FORCED = (2, 40, 41, 42, 2, 17, 60, 3)
"""Ends of sequence (2) among them."""
GREEDY = SamplingParams(max_new_tokens=len(FORCED), temperature=0.0)
WITH_LOGPROBS = LogprobParams(output=True, top=4)
PROMPTS = ((5, 9, 17, 33), (60,), tuple(range(3, 40)))


class NoStops:
    eos_ids = frozenset({2})


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny("llama", tmp_path_factory.mktemp("llama"))


def expected_logprobs(model: Path, ids: tuple[int, ...], first: int) -> np.ndarray:
    import torch
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = loaded(torch.tensor([ids])).logits[0].double().log_softmax(-1).numpy()
    return np.array([logprobs[at - 1, ids[at]] for at in range(first, len(ids))])


@pytest.mark.parametrize(
    ("platform", "graph", "pool"), [("cpu", True, 512), ("cpu", False, 512), ("mlx", False, 512), ("cpu", True, 110)]
)
def test_each_step_runs_on_the_forced_tokens(tiny_llama: Path, platform: str, graph: bool, pool: int) -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(tiny_llama), dtype="float32"),
        platform=PlatformConfig(platform=platform, disable_graph=not graph),
        cache=CacheConfig(max_total_tokens=pool),
        scheduler=SchedulerConfig(chunked_prefill_size=16, max_running_requests=8, random_seed=1),
    )
    prepared = prepare(config)
    core = EngineCore(prepared, NoStops())  # type: ignore[arg-type]
    for index, prompt in enumerate(PROMPTS):
        core.add(
            Generate(str(index), list(prompt), GREEDY, WITH_LOGPROBS, 0, None, None, 0.0, forced_output_ids=FORCED)
        )
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(PROMPTS))}
    logprobs: dict[str, list[float]] = {rid: [] for rid in tokens}
    ends: dict[str, FinishKind] = {}
    while core.has_work:
        core.turn()
        for news in core.take_news():
            for output in news.detailed:
                tokens[output.rid] += output.new_token_ids
                logprobs[output.rid] += [entry.logprob for entry in output.logprobs if entry is not None]
                if output.finish_reason is not None:
                    ends[output.rid] = output.finish_reason.kind
    core.scheduler.check_invariants()
    prepared.close()
    for index, prompt in enumerate(PROMPTS):
        assert tuple(tokens[str(index)]) == FORCED
        assert ends[str(index)] is FinishKind.LENGTH
        want = expected_logprobs(tiny_llama, (*prompt, *FORCED), len(prompt))
        assert np.allclose(logprobs[str(index)], want, atol=2e-5)


async def test_forced_tokens_cross_the_processes(tiny_model: Path) -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(tiny_model), dtype="float32"),
        platform=PlatformConfig(platform="null"),
        cache=CacheConfig(max_total_tokens=512),
    )
    async with await Frontend.start(config) as engine:
        request = GenerateRequest(input_ids=(5, 9), sampling=GREEDY, forced_output_ids=FORCED)
        free = replace(request, forced_output_ids=(), sampling=replace(GREEDY, ignore_eos=True))

        async def tokens(asked: GenerateRequest) -> tuple[int, ...]:
            return tuple([token async for output in engine.generate(asked) for token in output.token_ids])

        forced, others = await asyncio.gather(tokens(request), tokens(free))
        assert forced == FORCED
        assert others != FORCED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": replace(GREEDY, temperature=0.5)}, "sampling must be greedy and without a grammar, got temp"),
        (
            {"sampling": replace(GREEDY, grammar=GrammarSpec(kind=GrammarKind.REGEX, text="a"))},
            "temperature 0.0 and a grammar",
        ),
        ({"sampling": replace(GREEDY, max_new_tokens=3)}, "8 entries, more than max_new_tokens 3. Raise the one"),
        ({"forced_output_ids": (97,)}, "forced_output_ids holds 97, expected token ids between 0 and 96"),
    ],
)
def test_what_contradicts_forced_tokens_is_refused(changes: dict[str, object], message: str) -> None:
    request = replace(GenerateRequest(input_ids=(5,), sampling=GREEDY, forced_output_ids=FORCED), **changes)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=message) as caught:
        check_request(request, RequestLimits(vocab_size=97, platform="cpu"))
    assert caught.value.param == "forced_output_ids"
