"""The real SmolLM2 from one GGUF file on MLX and on the CPU platform: the same greedy tokens in float32."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("torch")

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig
from cardan.engine.core import EngineCore
from cardan.engine.messages import Generate
from cardan.engine.model_files import load_model_tokenizer
from cardan.engine.preparation import prepare
from cardan.types import LogprobParams, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

TOKENS = 32
TIE_MARGIN = 0.02
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n    ",
    "Once upon a time, there was a",
    "The three laws of motion are",
    "Question: What do bees make?\nAnswer:",
    "1, 2, 3, 5, 8, 13,",
    "import numpy as np\n\n",
    "The opposite of hot is",
    "Dear Sir or Madam,\n",
    "A recipe for pancakes:\n1.",
    "SELECT name FROM users WHERE",
    "In 1969, the first man",
    "Le chat est sur la",
    "The mitochondria is",
    "To be, or not to be,",
    "The stock market fell today because",
    "<html>\n<head>\n",
    "My favourite colour is",
    "Photosynthesis is the process by which",
    "He opened the door and saw",
    "The meaning of life is",
    "Translate to German: Good morning.\n",
    "Step 1: Preheat the oven to",
)


def greedy(path, platform):
    """Tokens of every prompt, and the logprobs of the two best ids at each step."""
    config = EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", context_length=128),
        platform=PlatformConfig(platform=platform),
        cache=CacheConfig(max_total_tokens=2048),
        scheduler=SchedulerConfig(max_running_requests=len(PROMPTS), random_seed=0),
    )
    prepared = prepare(config)
    tokenizer = load_model_tokenizer(config.model)
    core = EngineCore(prepared, tokenizer)
    for number, text in enumerate(PROMPTS):
        core.add(
            Generate(
                wire_id=str(number),
                prompt_ids=tokenizer.encode(text),
                sampling=SamplingParams(temperature=0.0, max_new_tokens=TOKENS, ignore_eos=True),
                logprobs=LogprobParams(output=True, top=2),
                priority=0,
                cache_salt=None,
                routing_key=None,
                arrival_s=0.0,
            )
        )
    found = {str(number): ([], []) for number in range(len(PROMPTS))}
    while core.has_work:
        core.turn()
        for news in core.take_news():
            for output in news.detailed:
                found[output.rid][0].extend(output.new_token_ids)
                found[output.rid][1].extend(entry for entry in output.logprobs if entry is not None)
    prepared.close()
    return found, tokenizer


@pytest.mark.timeout(1800)
def test_greedy_tokens_are_those_of_the_cpu_platform(smollm2_path):
    want, tokenizer = greedy(smollm2_path, "cpu")
    got, _ = greedy(smollm2_path, "mlx")
    equal = 0
    for rid, (tokens, logprobs) in want.items():
        assert len(tokens) == TOKENS
        if got[rid][0] == tokens:
            equal += 1
            continue
        parted = next(step for step in range(TOKENS) if got[rid][0][step] != tokens[step])
        (_, best), (_, second) = logprobs[parted].top
        assert best - second < TIE_MARGIN, PROMPTS[int(rid)]
    assert equal >= len(PROMPTS) - 1
    assert "Paris" in tokenizer.decode(got["0"][0])
