"""Every model family through the whole engine on the CPU platform, held to transformers in float32.

Chunks of odd sizes, prefix hits, batch mates of other lengths, retractions, mixed passes and both loops must not
change an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig
from cardan.engine.core import EngineCore
from cardan.engine.messages import Generate
from cardan.engine.preparation import prepare
from cardan.scheduler import RequestOutput
from cardan.types import LogprobParams, SamplingParams

CONTEXT = 160
NEW_TOKENS = 64
TOLERANCE = 2e-4
TIE_MARGIN = 1e-3

LAYOUTS: dict[str, dict[str, Any]] = {
    "whole-prompts": {"overlap": False, "chunk": -1, "pool": None},
    "odd-chunks-overlapped": {"overlap": True, "chunk": 7, "pool": None},
    "mixed-passes": {"overlap": True, "chunk": 13, "pool": None, "mixed": True},
    "retracting": {"overlap": True, "chunk": 11, "pool": 200},
    "retracting-plain-pages": {"overlap": False, "chunk": 16, "pool": 208, "page": 4},
    "no-cache": {"overlap": True, "chunk": 9, "pool": None, "radix": False},
}


class NoStops:
    """A tokenizer's place in an engine that is fed ids and never stops on one."""

    eos_ids: frozenset[int] = frozenset()


@dataclass
class Answer:
    """What one request got."""

    tokens: list[int] = field(default_factory=list)
    rows: list[np.ndarray[Any, Any]] = field(default_factory=list)
    prompt_rows: list[np.ndarray[Any, Any]] = field(default_factory=list)
    finished: bool = False
    cached: int = 0


class Oracle:
    """Float32 logits of one checkpoint by transformers."""

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


def prompts(seed: int) -> list[list[int]]:
    """Prompts of many lengths, half of which share a prefix."""
    rng = np.random.default_rng(seed)
    common = rng.integers(3, tiny_models.VOCAB, 37).tolist()
    lengths = (1, 2, 3, 8, 17, 31, 40, 63)
    alone = [rng.integers(3, tiny_models.VOCAB, n).tolist() for n in lengths]
    sharing = [common + rng.integers(3, tiny_models.VOCAB, n).tolist() for n in (1, 2, 5, 21)]
    return alone + sharing


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Oracle]]:
    folder = tmp_path_factory.mktemp("families")

    class Made(dict[str, tuple[Path, Oracle]]):
        def __missing__(self, family: str) -> tuple[Path, Oracle]:
            path = tiny_models.make_tiny(family, folder / family, context=CONTEXT)
            self[family] = path, Oracle(path)
            return self[family]

    return Made()


def start(folder: Path, layout: dict[str, Any]) -> tuple[EngineCore, Any]:
    """An engine over one checkpoint, in this process."""
    config = EngineConfig(
        model=ModelConfig(model=str(folder), dtype="float32"),
        platform=PlatformConfig(platform="cpu"),
        cache=CacheConfig(
            max_total_tokens=layout["pool"] or 4096,
            page_size=layout.get("page", 1),
            disable_radix_cache=not layout.get("radix", True),
        ),
        scheduler=SchedulerConfig(
            chunked_prefill_size=layout["chunk"],
            disable_overlap_schedule=not layout["overlap"],
            enable_mixed_chunk=layout.get("mixed", False),
            max_running_requests=16,
            schedule_conservativeness=0.05,
        ),
    )
    prepared = prepare(config)
    return EngineCore(prepared, NoStops()), prepared  # type: ignore[arg-type]


def dense(entry: Any) -> np.ndarray[Any, Any]:
    """The whole distribution that a position's top logprobs hold."""
    row = np.full(tiny_models.VOCAB, np.nan)
    for token, logprob in entry.top:
        row[token] = logprob
    assert not np.isnan(row).any()
    return row


def take(answer: Answer, output: RequestOutput) -> None:
    """Add one output to what a request got so far."""
    answer.tokens.extend(output.new_token_ids)
    answer.rows.extend(dense(entry) for entry in output.logprobs)
    answer.prompt_rows.extend(dense(entry) for entry in output.prompt_logprobs if entry is not None)
    answer.cached = max(answer.cached, output.num_cached_tokens)
    if output.finish_reason is not None:
        answer.finished = True
        assert output.finish_reason.kind == "length", output.finish_reason


def run(core: EngineCore, requests: dict[str, list[int]], prompt_logprobs: bool) -> dict[str, Answer]:
    """Run requests together to their ends."""
    answers = {rid: Answer() for rid in requests}
    for rid, ids in requests.items():
        core.add(
            Generate(
                wire_id=rid,
                prompt_ids=ids,
                sampling=SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0),
                logprobs=LogprobParams(output=True, top=tiny_models.VOCAB, prompt_start=0 if prompt_logprobs else None),
                priority=0,
                cache_salt=None,
                routing_key=None,
                arrival_s=0.0,
            )
        )
    for _ in range(10_000):
        if not core.has_work:
            break
        core.turn()
        for news in core.take_news():
            assert not news.rids, "every request asked for logprobs"
            for output in news.detailed:
                take(answers[output.rid], output)
    core.scheduler.check_invariants()
    assert all(answer.finished for answer in answers.values())
    return answers


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shifted = logits - logits.max(-1, keepdims=True)
    normalized: np.ndarray[Any, Any] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalized


def difference(got: np.ndarray[Any, Any], logits: np.ndarray[Any, Any]) -> float:
    """Largest error over the largest logit of each position; logprobs are compared, shifts cancel."""
    expected = log_softmax(logits)
    return float((np.abs(got - expected).max(-1) / np.abs(logits).max(-1)).max())


def hold_to(oracle: Oracle, prompt: list[int], answer: Answer) -> None:
    """Check one answer against transformers, along the answer's own tokens."""
    ids = prompt + answer.tokens
    logits = oracle.logits(ids)[len(prompt) - 1 : -1]
    assert difference(np.stack(answer.rows), logits) <= TOLERANCE
    for step, token in enumerate(answer.tokens):
        best = int(logits[step].argmax())
        if token != best:
            top_two = np.sort(logits[step])[-2:]
            assert top_two[1] - top_two[0] < TIE_MARGIN, f"step {step}: {token} is not {best}"
    if answer.prompt_rows:
        assert difference(np.stack(answer.prompt_rows), oracle.logits(prompt)[:-1]) <= TOLERANCE


@pytest.mark.parametrize("family", sorted(tiny_models.FAMILIES))
@pytest.mark.parametrize("layout", ["odd-chunks-overlapped", "retracting"])
def test_family(family: str, layout: str, checkpoints: dict[str, tuple[Path, Oracle]]) -> None:
    folder, oracle = checkpoints[family]
    check_layout(folder, oracle, LAYOUTS[layout])


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_layout(family: str, layout: str, checkpoints: dict[str, tuple[Path, Oracle]]) -> None:
    folder, oracle = checkpoints[family]
    check_layout(folder, oracle, LAYOUTS[layout])


def check_layout(folder: Path, oracle: Oracle, layout: dict[str, Any]) -> None:
    """Run twice, so that the second time prefixes hit, and hold every answer to the reference."""
    core, prepared = start(folder, layout)
    try:
        requests = {f"r{i}": ids for i, ids in enumerate(prompts(seed=1))}
        cold = run(core, requests, prompt_logprobs=layout["pool"] is None)
        warm = run(core, {f"w{rid}": ids for rid, ids in requests.items()}, prompt_logprobs=False)
        for rid, ids in requests.items():
            if len(ids) > 1 or layout["pool"]:
                hold_to(oracle, ids, cold[rid])
            hold_to(oracle, ids, warm[f"w{rid}"])
        totals = core.stats().totals
        if layout["pool"]:
            assert totals.get("retractions", 0) > 0
        elif layout.get("radix", True):
            assert warm["wr7"].cached == len(requests["r7"]) - 1
        else:
            assert warm["wr7"].cached == 0
    finally:
        prepared.close()
