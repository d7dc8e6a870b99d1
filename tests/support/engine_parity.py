"""Runs a whole engine in this process on the CPU platform in float32, and holds its answers to transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig
from cardan.engine.core import EngineCore
from cardan.engine.messages import Generate
from cardan.engine.preparation import Prepared, prepare
from cardan.scheduler import RequestOutput
from cardan.types import LogprobParams, SamplingParams, TokenLogprobs

NEW_TOKENS = 64
TOLERANCE = 2e-4
TIE_MARGIN = 1e-3

LAYOUTS: dict[str, dict[str, Any]] = {
    "whole-prompts": {"overlap": False, "chunk": -1},
    "odd-chunks-overlapped": {"overlap": True, "chunk": 7},
    "mixed-passes": {"overlap": True, "chunk": 13, "mixed": True},
    "retracting": {"overlap": True, "chunk": 11, "pool": 200},
    "retracting-plain-pages": {"overlap": False, "chunk": 16, "pool": 208, "page": 4},
    "no-cache": {"overlap": True, "chunk": 9, "radix": False},
}
"""Ways to run the same requests, none of which may change an answer."""


class NoStops:
    """A tokenizer's place in an engine that is fed ids and never stops on one."""

    eos_ids: frozenset[int] = frozenset()


class Oracle(Protocol):
    """Something nobody here wrote that knows the right logits."""

    def logits(self, ids: list[int]) -> np.ndarray[Any, Any]:
        """Logits at every position, ``[len(ids), vocab]``."""


@dataclass
class Answer:
    """What one request got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: bool = False
    cached: int = 0

    def take(self, output: RequestOutput) -> None:
        """Add one output."""
        self.tokens.extend(output.new_token_ids)
        self.logprobs.extend(entry for entry in output.logprobs if entry is not None)
        self.prompt_logprobs.extend(entry for entry in output.prompt_logprobs if entry is not None)
        self.cached = max(self.cached, output.num_cached_tokens)
        if output.finish_reason is not None:
            self.finished = True
            assert output.finish_reason.kind == "length", output.finish_reason


def start(model: Path, layout: dict[str, Any]) -> tuple[EngineCore, Prepared]:
    """An engine over one checkpoint, in this process."""
    config = EngineConfig(
        model=ModelConfig(model=str(model), dtype="float32"),
        platform=PlatformConfig(platform="cpu"),
        cache=CacheConfig(
            max_total_tokens=layout.get("pool", 4096),
            page_size=layout.get("page", 1),
            disable_radix_cache=not layout.get("radix", True),
        ),
        scheduler=SchedulerConfig(
            chunked_prefill_size=layout["chunk"],
            disable_overlap_schedule=not layout["overlap"],
            enable_mixed_chunk=layout.get("mixed", False),
            max_running_requests=layout.get("rows", 16),
            schedule_conservativeness=0.05,
        ),
    )
    prepared = prepare(config)
    return EngineCore(prepared, NoStops()), prepared  # type: ignore[arg-type]


def run(core: EngineCore, requests: dict[str, list[int]], top: int, prompt_logprobs: bool) -> dict[str, Answer]:
    """Run requests together to their ends, with ``top`` logprobs at each position."""
    answers = {rid: Answer() for rid in requests}
    for rid, ids in requests.items():
        message = Generate(
            wire_id=rid,
            prompt_ids=ids,
            sampling=SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0),
            logprobs=LogprobParams(output=True, top=top, prompt_start=0 if prompt_logprobs else None),
            priority=0,
            cache_salt=None,
            routing_key=None,
            arrival_s=0.0,
        )
        core.add(message)
    for _ in range(20_000):
        if not core.has_work:
            break
        core.turn()
        for news in core.take_news():
            assert not news.rids, "every request asked for logprobs"
            for output in news.detailed:
                answers[output.rid].take(output)
    core.scheduler.check_invariants()
    assert all(answer.finished for answer in answers.values())
    return answers


def hold_to(oracle: Oracle, prompt: list[int], answer: Answer) -> None:
    """Check one answer along its own tokens: logits within ``TOLERANCE``, every token the best but for ties."""
    logits = oracle.logits(prompt + answer.tokens)
    generated = logits[len(prompt) - 1 : -1]
    assert len(answer.tokens) == NEW_TOKENS
    assert _difference(answer.logprobs, generated) <= TOLERANCE
    for step, token in enumerate(answer.tokens):
        best = int(generated[step].argmax())
        if token != best:
            top_two = np.sort(generated[step])[-2:]
            assert top_two[1] - top_two[0] < TIE_MARGIN, f"step {step}: {token} is not {best}"
    if answer.prompt_logprobs:
        assert len(answer.prompt_logprobs) == len(prompt) - 1
        assert _difference(answer.prompt_logprobs, logits[: len(prompt) - 1]) <= TOLERANCE


def _difference(entries: list[TokenLogprobs], logits: np.ndarray[Any, Any]) -> float:
    """Largest error of a reported logprob over the largest logit of its position."""
    assert len(entries) == len(logits)
    worst = 0.0
    for entry, row in zip(entries, logits, strict=True):
        ids = [token for token, _ in entry.top]
        got = np.array([logprob for _, logprob in entry.top])
        shifted = row - row.max()
        want = (shifted - np.log(np.exp(shifted).sum()))[ids]
        worst = max(worst, float(np.abs(got - want).max() / np.abs(row).max()))
    return worst


def greedy(core: EngineCore, prompts: dict[int, list[int]], num_tokens: int) -> dict[int, list[int]]:
    """Greedy answers to prompts that run together."""
    answers: dict[int, list[int]] = {i: [] for i in prompts}
    for i, ids in prompts.items():
        message = Generate(
            wire_id=str(i),
            prompt_ids=ids,
            sampling=SamplingParams(max_new_tokens=num_tokens, temperature=0.0),
            logprobs=LogprobParams(),
            priority=0,
            cache_salt=None,
            routing_key=None,
            arrival_s=0.0,
        )
        core.add(message)
    while core.has_work:
        core.turn()
        for news in core.take_news():
            for rid, new in news.tokens():
                answers[int(rid)].extend(new)
    core.scheduler.check_invariants()
    assert all(len(answer) == num_tokens for answer in answers.values())
    return answers


def check_small_pool(model: Path, prompts: list[list[int]], num_tokens: int) -> None:
    """Run prompts together over a pool of 2,048 tokens, which does not hold them, then each alone: same answers."""
    core, prepared = start(model, {"overlap": True, "chunk": 512, "pool": 2048, "rows": 64})
    try:
        together = greedy(core, dict(enumerate(prompts)), num_tokens)
        assert core.stats().totals.get("retractions", 0) > 0
        for i, prompt in enumerate(prompts):
            assert core.flush_cache()
            assert greedy(core, {i: prompt}, num_tokens)[i] == together[i], f"request {i}"
    finally:
        prepared.close()


def check_layout(model: Path, oracle: Oracle, name: str, prompts: list[list[int]], top: int) -> None:
    """Run prompts twice, so that the second time prefixes hit, and hold every answer to the oracle."""
    layout = LAYOUTS[name]
    core, prepared = start(model, layout)
    try:
        cold = run(core, {f"r{i}": ids for i, ids in enumerate(prompts)}, top, prompt_logprobs="pool" not in layout)
        warm = run(core, {f"w{i}": ids for i, ids in enumerate(prompts)}, top, prompt_logprobs=False)
        for i, ids in enumerate(prompts):
            hold_to(oracle, ids, cold[f"r{i}"])
            hold_to(oracle, ids, warm[f"w{i}"])
        longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
        if "pool" in layout:
            assert core.stats().totals.get("retractions", 0) > 0
        elif layout.get("radix", True):
            assert warm[f"w{longest}"].cached == len(prompts[longest]) - 1
        else:
            assert warm[f"w{longest}"].cached == 0
    finally:
        prepared.close()
