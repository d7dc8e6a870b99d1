"""Engines over a tiny model of random weights on any platform, and requests that between them use every field.

It needs neither torch nor transformers, so that torch-free environments can run it. It compares runs with each other,
of two platforms or two loops; what the right tokens are is not known here (the conformance suite's ``end_to_end``
compares them with a reference model).
"""

from __future__ import annotations

import numpy as np
import pytest

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig
from cardan.engine.core import EngineCore
from cardan.engine.messages import Generate
from cardan.engine.model_files import load_model_tokenizer
from cardan.engine.preparation import prepare
from cardan.types import LogprobParams, SamplingParams

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=40),
    "greedy-long": SamplingParams(temperature=0.0, max_new_tokens=90, ignore_eos=True),
    "plain-draw": SamplingParams(temperature=1.0, seed=11, max_new_tokens=40, ignore_eos=True),
    "hot": SamplingParams(temperature=1.7, seed=2**63 + 5, max_new_tokens=30, ignore_eos=True),
    "top-k": SamplingParams(temperature=1.0, top_k=5, seed=3, max_new_tokens=30, ignore_eos=True),
    "top-p": SamplingParams(temperature=1.0, top_p=0.6, seed=4, max_new_tokens=30, ignore_eos=True),
    "min-p": SamplingParams(temperature=1.2, min_p=0.2, seed=5, max_new_tokens=30, ignore_eos=True),
    "all-filters": SamplingParams(
        temperature=0.9, top_k=40, top_p=0.9, min_p=0.05, seed=6, max_new_tokens=30, ignore_eos=True
    ),
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.4, max_new_tokens=40, ignore_eos=True),
    "counts": SamplingParams(
        temperature=0.8, frequency_penalty=0.7, presence_penalty=0.4, seed=8, max_new_tokens=40, ignore_eos=True
    ),
    "bias": SamplingParams(
        temperature=0.0, logit_bias={65: 4.0, 66: -100.0}, max_new_tokens=20, min_new_tokens=10, ignore_eos=False
    ),
    "stops": SamplingParams(temperature=1.0, seed=9, max_new_tokens=60, stop_token_ids=(17, 40, 99), min_new_tokens=3),
    "stop-text": SamplingParams(temperature=1.0, seed=10, max_new_tokens=60, stop=("a", "Q"), stop_regex=("[x-z]",)),
}
LOGPROBS = {
    "greedy": LogprobParams(output=True, top=3, prompt_start=0),
    "counts": LogprobParams(output=True, top=0, token_ids=(1, 65, 259)),
    "top-p": LogprobParams(output=True, top=5, prompt_start=2),
}


def prompts():
    rng = np.random.default_rng(0)
    common = rng.integers(0, 256, 30).tolist()
    lengths = rng.integers(1, 60, len(PARAMS))
    return {
        name: (common if number % 3 == 0 else []) + rng.integers(0, 256, count).tolist()
        for number, (name, count) in enumerate(zip(PARAMS, lengths, strict=True))
    }


def start(model, platform, overlap=True, **layout):
    config = EngineConfig(
        model=ModelConfig(
            model=str(model),
            dtype="float32",
            random_weights=layout.get("random_weights", 5),
            quantization=layout.get("quantization"),
        ),
        platform=PlatformConfig(platform=platform, options=layout.get("options", ())),
        cache=CacheConfig(max_total_tokens=layout.get("pool", 4096)),
        scheduler=SchedulerConfig(
            chunked_prefill_size=layout.get("chunk", 64),
            disable_overlap_schedule=not overlap,
            enable_mixed_chunk=layout.get("mixed", False),
            max_running_requests=layout.get("rows", 16),
            random_seed=1,
        ),
    )
    prepared = prepare(config)
    return EngineCore(prepared, load_model_tokenizer(config.model)), prepared


def answers(model, platform, names=tuple(PARAMS), **layout):
    """Tokens, logprobs, prompt logprobs and the reason of the end of each request."""
    core, prepared = start(model, platform, **layout)
    try:
        return run(core, names)
    finally:
        prepared.close()


def run(core, names):
    texts = prompts()
    found = {name: ([], [], [], []) for name in names}
    for name in names:
        core.add(
            Generate(
                wire_id=name,
                prompt_ids=texts[name],
                sampling=PARAMS[name],
                logprobs=LOGPROBS.get(name, LogprobParams()),
                priority=0,
                cache_salt=None,
                routing_key=None,
                arrival_s=0.0,
            )
        )
    while core.has_work:
        core.turn()
        for batch in core.take_news():
            for name, tokens in batch.tokens():
                found[name][0].extend(tokens)
            for output in batch.detailed:
                found[output.rid][1].extend(entry for entry in output.logprobs if entry is not None)
                found[output.rid][2].extend(entry for entry in output.prompt_logprobs if entry is not None)
                if output.finish_reason is not None:
                    found[output.rid][3].append((output.finish_reason.kind, output.finish_reason.matched))
    core.scheduler.check_invariants()
    return found


LOGPROB_DRIFT = 2e-4
"""How far two float32 runs of these small models may drift apart in a logprob. Each of two layers has four linears in
a row (the value's, the output's, gate and up, down), and the head is one. Each is off by at most (n + 1) u Σ|x||w| with
n ≤ 128 columns and u = 2^-24, and Σ|x||w| is about sqrt(n) times the result: at most 9e-5 of it each. Errors of nine
add up like a random walk, to 3e-4 of a logit, and worst cases of sums of this length are met to a few per cent. A wrong
token, slot or weight moves a logprob by some hundredths."""


def assert_same(one, other):
    """Tokens, ids of logprobs and ends are equal, and logprobs within ``LOGPROB_DRIFT``."""
    for name in one:
        assert one[name][0] == other[name][0], name
        assert one[name][3] == other[name][3], name
        for mine, theirs in zip(one[name][1:3], other[name][1:3], strict=True):
            assert len(mine) == len(theirs)
            for a, b in zip(mine, theirs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=LOGPROB_DRIFT)
                for pairs_a, pairs_b in ((a.top, b.top), (a.chosen, b.chosen)):
                    assert [i for i, _ in pairs_a] == [i for i, _ in pairs_b]
                    assert [x for _, x in pairs_a] == pytest.approx([x for _, x in pairs_b], abs=LOGPROB_DRIFT)
