"""Whole engines on the simulated NPU: a tiny model of every family against the reference, ModelSlim, and SmolLM2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints as made
from modelslim_checkpoints import STEP, ZERO, write

from cardan.config import CacheConfig, EngineConfig, ModelConfig
from cardan.engine.core import EngineCore
from cardan.engine.preparation import prepare
from cardan.models import MODEL_FAMILIES
from cardan.testing.conformance.engine_run import Ask, EngineRun, Layout, NoStops
from cardan.testing.conformance.parity import run_layout
from cardan.testing.conformance.subject import Subject
from cardan.testing.conformance.tiny_configs import WRAPPERS
from cardan.types import LogprobParams, SamplingParams

ROOT = Path(__file__).parents[3]
TOKENS = 16
BOUND = 5 * (7 * made.LAYERS) ** 0.5 * 3.5 / 127 / 12**0.5
"""Five standard deviations of a logprob: each of a layer's seven matrices, whose rows have norm 1, adds what a step for
each token rounds, evenly within a 127th of the largest, 3.5 times the mean of 128 numbers at random. Where the
reference rounds by the same step, less: what bfloat16 has moved to the neighbouring code."""
IDS = (1, 17, 4, 80, 33, 9, 61, 2, 45, 45, 7)


@pytest.fixture(scope="module")
def subject(torch_npu) -> Iterator[Subject]:
    from cardan_npu import platform

    with Subject(platform, quick=True) as found:
        yield found


@pytest.mark.parametrize("architecture", [name for name in MODEL_FAMILIES if name not in WRAPPERS])
def test_greedy_tokens_of_every_family_are_those_of_the_reference(subject, architecture):
    layout = Layout(name=f"{architecture} in chunks, replayed", chunk=32, graph=True)
    run_layout(subject, layout, architecture, new_tokens=6)


def first_logprobs(subject: Subject, folder: Path, **model: Any) -> tuple[Any, dict[int, float]]:
    """The plan of a checkpoint without a tokenizer, and the likeliest tokens after a prompt."""
    chosen = ModelConfig(model=str(folder), dtype="bfloat16", **model)
    prepared = prepare(EngineConfig(model=chosen, cache=CacheConfig(max_total_tokens=512)), platform=subject.platform)
    run = EngineRun.__new__(EngineRun)
    run._layout, run.core = Layout(name="checkpoint"), EngineCore(prepared, NoStops())
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    answer = run.ask({"r": Ask(ids=IDS, sampling=sampling, logprobs=LogprobParams(output=True, top=8))})["r"]
    prepared.close()
    return prepared, dict(answer.logprobs[0].top)


def rounded_as_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense products of activations as W8A8's one step rounds and cuts them; the head's stay as they are."""
    from cardan_torch import DenseWeight

    def apply(weight: Any, x: Any) -> Any:
        rows = weight.weight.float()
        wide = x.float()
        if len(rows) != made.VOCAB:
            codes = (wide / STEP).round() + ZERO
            wide = (codes.clamp(-128, 127) - ZERO) * STEP
        return (wide @ rows.t()).to(x.dtype)

    monkeypatch.setattr(DenseWeight, "apply", apply)


@pytest.mark.parametrize("kind", ["W8A8_DYNAMIC", "W8A8"])
def test_a_checkpoint_of_modelslim_is_multiplied_as_it_is(subject, tmp_path, monkeypatch, kind):
    """Held to its values in bfloat16, with activations rounded by the checkpoint's step where it has one for all."""
    values = write(tmp_path / "quantized", kind)
    prepared, got = first_logprobs(
        subject, tmp_path / "quantized", quantization="ascend", quantization_fallback="refuse"
    )
    assert prepared.plan.settings["quantization"].value == "INT8_128_F32_A8"
    assert not [note for note in prepared.loaded.notes if "widened" in note]
    if kind == "W8A8":
        rounded_as_calibrated(monkeypatch)
    dense, want = first_logprobs(subject, made.write_dense(tmp_path / "dense", values))
    shared = got.keys() & want.keys()
    assert len(shared) >= 6
    assert max(abs(got[token] - want[token]) for token in shared) < BOUND
    assert prepared.loaded.weight_bytes < 0.85 * dense.loaded.weight_bytes


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_greedy_tokens_of_smollm2_are_those_of_the_cpu_platform(torch_npu, smollm2_path):
    """In bfloat16, so runs may part where two tokens are nearly as likely."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import greedy_tokens as module

    sys.path.remove(str(ROOT / "benchmarks"))
    from cardan import Engine

    prompts = module.PROMPTS[:8]
    sizes = {"context_length": 128, "max_total_tokens": 2048, "max_running_requests": len(prompts)}
    with Engine(model=str(smollm2_path), platform="npu", log_level="warning", **sizes) as engine:
        answers = engine.generate(
            list(prompts), {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}, return_logprob=True
        )
    for answer, want in zip(answers, module.recorded(), strict=False):
        step = next((at for at, token in enumerate(answer["output_ids"]) if token != want.tokens[at]), None)
        assert step is None or want.margins[step] < 0.15, f"{want.prompt!r} parts at {step}"
