"""Runs requests through an engine in this process, and measures prefill and decode; compares greedy tokens.

It knows no platform.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from device_parts import Clock, folder_of, open_engine

from cardan.engine.core import EngineCore
from cardan.engine.messages import Generate
from cardan.engine.preparation import Prepared
from cardan.platform import Platform
from cardan.platform.discovery import choose_platform
from cardan.testing.conformance.engine_run import NoStops
from cardan.types import LogprobParams, SamplingParams

CLOSE = 2e-3
"""Two logprobs that differ by no more may change places between two ways to sum in float32."""


def prompts(rows: int, length: int, vocab: int) -> list[list[int]]:
    """Token ids that no two rows share a prefix of."""
    rng = np.random.default_rng(rows)
    return rng.integers(3, vocab, (rows, length)).tolist()


class Run:
    """An engine and what becomes of its requests."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.core = EngineCore(prepared, NoStops())  # type: ignore[arg-type]
        self._asked = 0

    def ask(self, ids: list[list[int]], new_tokens: int, clock: Clock, top: int = 0) -> dict[str, Any]:
        """Greedy tokens of some prompts together, and the seconds of prefill and decode."""
        tokens: dict[str, list[int]] = {}
        logprobs: dict[str, list[Any]] = {}
        for row in ids:
            rid = f"r{self._asked}"
            self._asked += 1
            tokens[rid], logprobs[rid] = [], []
            sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0)
            wanted = LogprobParams(output=top > 0, top=top)
            self.core.add(
                Generate(
                    wire_id=rid, prompt_ids=row, sampling=sampling, logprobs=wanted, priority=0, cache_salt=None,
                    routing_key=None, arrival_s=0.0,
                )
            )  # fmt: skip
        start_s, first_s = time.perf_counter(), None
        while self.core.has_work:
            clock.check()
            self.core.turn()
            for news in self.core.take_news():
                for rid, token in zip(news.rids, news.token_ids, strict=True):
                    tokens[rid].append(int(token))
                for output in news.detailed:
                    tokens[output.rid].extend(output.new_token_ids)
                    logprobs[output.rid].extend(output.logprobs)
            if first_s is None and all(tokens.values()):
                first_s = time.perf_counter()
        end_s = time.perf_counter()
        first_s = end_s if first_s is None else first_s
        return {
            "tokens": list(tokens.values()),
            "logprobs": list(logprobs.values()),
            "prefill_s": first_s - start_s,
            "decode_s": end_s - first_s,
        }

    def close(self) -> None:
        """Give the device back."""
        self.prepared.close()


def measure(platform: Platform, shape: str, where: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Prefill and decode of a made-up model at several batch sizes, in tokens a second.

    Args:
        platform: that it runs on.
        shape: of the model.
        where: ``folder``, ``options``, ``batches``, ``prompt`` and ``new`` tokens.
        clock: of the part.
    """
    folder = folder_of(shape, where["folder"])
    limits = {"max_running_requests": max(where["batches"]), "context_length": where["prompt"] + where["new"] + 16}
    run = Run(open_engine(platform, folder, limits, where["options"]))
    vocab = run.prepared.plan.model.vocab_size
    found: dict[str, Any] = {"start_s": {k: round(v, 2) for k, v in run.prepared.started_s.items()}, "batches": {}}
    try:
        run.ask(prompts(1, where["prompt"], vocab), 2, clock)
        for rows in where["batches"]:
            got = run.ask(prompts(rows, where["prompt"], vocab), where["new"], clock)
            found["batches"][rows] = {
                "prefill_tokens_s": round(rows * where["prompt"] / got["prefill_s"], 1),
                "decode_tokens_s": round(rows * (where["new"] - 1) / max(got["decode_s"], 1e-9), 1),
            }
    finally:
        found["graph_replays"] = int(run.core.stats().totals.get("graph_replays", 0))
        run.close()
    return found


def parity(platform: Platform, model: Path, where: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Greedy tokens in float32 against torch's on this machine's CPU, and graphs against eager steps."""
    limits = {"dtype": "float32", "max_running_requests": 4, "context_length": where["prompt"] + where["new"] + 16}
    cpu = choose_platform("cpu", options=("kernels=torch",)).configured({"kernels": "torch"})
    answers = {}
    ways = {"cpu": (cpu, ("kernels=torch",), True), "graph": (platform, where["options"], False)}
    ways["eager"] = (platform, where["options"], True)
    for name, (used, options, eager) in ways.items():
        run = Run(open_engine(used, model, {**limits, "disable_graph": eager}, options))
        try:
            ids = prompts(where["rows"], where["prompt"], run.prepared.plan.model.vocab_size)
            answers[name] = run.ask(ids, where["new"], clock, top=2)
        finally:
            run.close()
    return {
        f"{name}_against_{other}": compare(answers[other], answers[name])
        for name, other in (("graph", "cpu"), ("eager", "cpu"), ("graph", "eager"))
    }


def compare(want: dict[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    """How many rows agree, and where others part; they may where the two likeliest tokens are close."""
    equal, parted, wrong = 0, [], 0
    for row, (one, other) in enumerate(zip(want["tokens"], got["tokens"], strict=True)):
        place = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        if place is None:
            equal += 1
            continue
        (_, first), (_, second) = sorted(want["logprobs"][row][place].top, key=lambda pair: -pair[1])[:2]
        margin = float(first - second)
        parted.append({"row": row, "step": place, "margin": round(margin, 5)})
        wrong += margin > CLOSE
    return {"rows": len(want["tokens"]), "equal": equal, "parted": parted, "passed": wrong == 0}
