"""Real weights on the CPU platform through the whole engine, compared with transformers' own generation."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import tiny_models

from cardan.engine import Engine, prepare
from cardan.engine.core import EngineCore
from cardan.engine.messages import Generate
from cardan.engine.model_files import load_model_tokenizer
from cardan.engine.options import config_from_options
from cardan.types import LogprobParams, SamplingParams

PROMPTS = [[5, 9, 17, 33], [5, 9, 17, 40, 41, 42], [60], list(range(3, 30))]


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory, tiny_model):
    folder = tiny_models.make_tiny("llama", tmp_path_factory.mktemp("llama"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def llama(tiny_llama) -> Iterator[Engine]:
    with Engine(
        model=str(tiny_llama), platform="cpu", dtype="float32", max_total_tokens=256, chunked_prefill_size=16
    ) as started:
        yield started


@pytest.fixture(scope="module")
def reference(tiny_llama):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()

    def run(prompt, count):
        with torch.no_grad():
            made = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            logprobs = torch.log_softmax(model(made).logits[0].double(), -1)
        tokens = made[0].tolist()
        picked = [float(logprobs[position, tokens[position + 1]]) for position in range(len(tokens) - 1)]
        return tokens[len(prompt) :], picked

    return run


class TestTinyLlama:
    """A random llama in float32: greedy tokens and logprobs are transformers'."""

    def test_a_batch_of_greedy_requests(self, llama, reference):
        params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        for _ in range(2):  # the second time from cached prefixes
            answers = llama.generate(input_ids=PROMPTS, sampling_params=params)
            assert [answer["output_ids"] for answer in answers] == [reference(prompt, 12)[0] for prompt in PROMPTS]

    def test_logprobs_of_prompt_and_output(self, llama, reference):
        prompt = PROMPTS[3]
        meta = llama.generate(
            input_ids=prompt,
            sampling_params={"temperature": 0, "max_new_tokens": 5, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
        )["meta_info"]
        _, wanted = reference(prompt, 5)
        got = [entry[0] for entry in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]
        assert got == pytest.approx(wanted, abs=1e-4)

    def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(self, llama):
        params = {"temperature": 1.0, "seed": 11, "max_new_tokens": 10, "ignore_eos": True}
        alone = llama.generate(input_ids=PROMPTS[0], sampling_params=params)["output_ids"]
        crowd = llama.generate(input_ids=[PROMPTS[0]] * 3 + PROMPTS, sampling_params=params)
        assert [answer["output_ids"] for answer in crowd[:4]] == [alone] * 4


def test_random_weights_need_no_checkpoint_and_follow_their_seed(tiny_model):
    def logprobs(seed):
        config = config_from_options(
            {"model": str(tiny_model), "platform": "cpu", "random_weights": seed, "max_total_tokens": 64}
        )
        prepared = prepare(config)
        core = EngineCore(prepared, load_model_tokenizer(config.model))
        params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
        core.add(Generate("a", [1, 2, 3], params, LogprobParams(output=True), 0, None, None, 0.0))
        found: list[float] = []
        while core.has_work:
            core.turn()
            found += [item.logprob for news in core.take_news() for output in news.detailed for item in output.logprobs]
        prepared.close()
        return found

    assert len(logprobs(1)) == 12
    assert logprobs(1) == logprobs(1) != logprobs(2)


@pytest.mark.model
def test_the_capital_of_france(smollm2_path):
    with Engine(model=str(smollm2_path), platform="cpu", max_total_tokens=2048) as engine:
        answer = engine.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 4})
        assert answer["text"].startswith(" Paris")
        assert answer["meta_info"]["prompt_tokens"] == 5
