"""Where the time of a step goes: each op of the device, and each part of the host's work around it.

Steps run eagerly and one after the other, so that every op can be timed; a captured step saves what ``launch`` takes
beyond the ops. It knows no platform.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cardan.bench.op_times import OpClock, timed_platform
from cardan.bench.workload import FIRST_ID
from cardan.config import EngineConfig
from cardan.engine.detokenizer import Detokenizer
from cardan.engine.messages import OpenStream, TokenBatch
from cardan.engine.model_files import load_model_tokenizer
from cardan.engine.preparation import Prepared, prepare
from cardan.errors import ConfigError
from cardan.platform.discovery import choose_platform
from cardan.scheduler import OutputBatch, Request, Scheduler
from cardan.types import SamplingParams

HOST_PARTS = ("plan", "launch", "sample", "wait", "commit", "detokenize")
"""Parts of the host's work, in order; ops run within ``launch``, ``sample`` and ``wait`` and are taken out there."""

_WARM_UP_STEPS = 3
_PREFILLS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OpLine:
    """One op in one kind of step, a step's mean.

    Attributes:
        name: of the op.
        calls: a step.
        us: microseconds a step.
        share: of the step, 0 to 1.
        gb_s: weights read, gigabytes a second, or None where no weights are.
        gflop_s: products, or None.
    """

    name: str
    calls: float
    us: float
    share: float
    gb_s: float | None
    gflop_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One kind of step.

    Attributes:
        kind: ``prefill`` or ``decode``.
        rows: requests in it.
        tokens: in it.
        steps: how many were measured.
        step_us: a step's mean with every op timed.
        untimed_us: the same without timing ops, which costs a little.
        ops: of the device, the longest first.
        host: microseconds of each of ``HOST_PARTS`` without ops.
    """

    kind: str
    rows: int
    tokens: int
    steps: int
    step_us: float
    untimed_us: float
    ops: tuple[OpLine, ...]
    host: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """As values that any JSON encoder takes."""
        return asdict(self)


def profile(
    config: EngineConfig,
    *,
    prompt_len: int,
    rows: Sequence[int],
    steps: int,
    on_part: Callable[[str, int, int], None] | None = None,
) -> tuple[list[StepProfile], dict[str, Any]]:
    """Profile a prefill of one prompt, and decode steps at some numbers of rows.

    Args:
        config: of the engine; its steps run eagerly here.
        prompt_len: tokens of the prompt.
        rows: numbers of rows.
        steps: decode steps that are measured.
        on_part: told how far the start is.

    Returns:
        The profiles, and the plan's name of model, platform and device.

    Raises:
        ConfigError: nothing to measure, or a prompt that does not fit.
        CardanError: the model or a setting is refused.
    """
    for flag, value in (("--prompt-len", prompt_len), ("--steps", steps), *(("--rows", count) for count in rows)):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}.")
    config = replace(config, platform=replace(config.platform, disable_graph=True))
    clock = OpClock()
    platform = timed_platform(choose_platform(config.platform.platform, options=config.platform.options), clock)
    prepared = prepare(config, on_part or (lambda part, done, total: None), platform)
    try:
        longest = prepared.settings.context_length - 2 * steps - 2 * _WARM_UP_STEPS - 2
        if prompt_len > longest:
            raise ConfigError(
                f"--prompt-len must be at most {longest}, what the context length leaves beside the steps, got "
                f"{prompt_len}. Pass a shorter prompt or fewer steps."
            )
        driver = _Driver(prepared, config, clock)
        found = [driver.prefill(prompt_len)]
        found += [driver.decode(count, steps) for count in rows]
    finally:
        prepared.close()
    plan = prepared.plan
    return found, {"model": plan.model.name, "platform": plan.platform, "device": plan.device.detail}


class _Driver:
    """Runs steps as the plain loop does, and times their parts."""

    def __init__(self, prepared: Prepared, config: EngineConfig, clock: OpClock) -> None:
        self._prepared = prepared
        self._clock = clock
        self._tokenizer = load_model_tokenizer(config.model, renders_chat=False)
        self._random = np.random.default_rng(0)
        self._seconds = dict.fromkeys(HOST_PARTS, 0.0)

    def prefill(self, prompt_len: int) -> StepProfile:
        """Prompts one by one, each until it is computed; other tokens every time."""
        chunk = self._prepared.settings.chunked_prefill_size or prompt_len
        walls = []
        for timed in (False, False, True):
            self._reset(timed)
            for _ in range(_PREFILLS):
                scheduler, detokenizer = self._filled(1, prompt_len, 1)
                for _ in range(-(-prompt_len // chunk)):
                    self._turn(scheduler, detokenizer)
            walls.append(sum(self._seconds.values()))
        return self._summary("prefill", (1, prompt_len, _PREFILLS), walls[1])

    def decode(self, rows: int, steps: int) -> StepProfile:
        """Steps of requests that never end."""
        scheduler, detokenizer = self._filled(rows, 16, 2 * steps + 2 * _WARM_UP_STEPS + 8)
        self._reset(False)
        while scheduler.stats().num_running < rows or scheduler.stats().num_queued:
            self._turn(scheduler, detokenizer)
        walls = []
        for timed in (False, True):
            self._reset(timed)
            for _ in range(_WARM_UP_STEPS):
                self._turn(scheduler, detokenizer)
            self._reset(timed)
            for _ in range(steps):
                self._turn(scheduler, detokenizer)
            walls.append(sum(self._seconds.values()))
        return self._summary("decode", (rows, rows, steps), walls[0])

    def _reset(self, timed: bool) -> None:
        self._clock.clear()
        self._clock.on = timed
        self._seconds = dict.fromkeys(HOST_PARTS, 0.0)

    def _filled(self, rows: int, prompt_len: int, output_len: int) -> tuple[Scheduler, Detokenizer]:
        """A scheduler with that many requests, and a detokenizer that waits for their tokens."""
        scheduler = Scheduler(self._prepared.settings)
        detokenizer = Detokenizer(self._tokenizer, 1)
        params = SamplingParams(max_new_tokens=output_len, temperature=0.0, ignore_eos=True)
        vocab = self._prepared.settings.vocab_size
        for number in range(rows):
            ids = self._random.integers(min(FIRST_ID, vocab - 1), vocab, prompt_len).astype(np.int32)
            scheduler.add(Request(rid=str(number), prompt_ids=ids, params=params))
            detokenizer.open(OpenStream(str(number), params))
        return scheduler, detokenizer

    def _turn(self, scheduler: Scheduler, detokenizer: Detokenizer) -> None:
        """One step; the time of ops is taken out of the part that they ran in."""
        scheduled = self._part("plan", lambda: scheduler.plan(time.monotonic()))
        assert scheduled is not None, "requests that have not ended are running"
        step = self._part("launch", lambda: self._prepared.runner.launch(scheduled.batch))
        self._part("sample", step.sample)
        result = self._part("wait", step.result)
        news: OutputBatch = self._part("commit", lambda: scheduler.commit(scheduled, result))
        batch = TokenBatch(news.rids, news.token_ids, [])
        self._part("detokenize", lambda: _to_text(detokenizer, batch))

    def _part(self, name: str, run: Callable[[], Any]) -> Any:
        ops_s, start_s = self._clock.total_s, time.perf_counter()
        result = run()
        self._seconds[name] += time.perf_counter() - start_s - (self._clock.total_s - ops_s)
        return result

    def _summary(self, kind: str, sizes: tuple[int, int, int], untimed_s: float) -> StepProfile:
        rows, tokens, steps = sizes
        step_s = sum(self._seconds.values()) + self._clock.total_s
        lines = [
            OpLine(
                name=name,
                calls=one.calls / steps,
                us=one.seconds * 1e6 / steps,
                share=one.seconds / step_s,
                gb_s=one.weight_bytes / one.seconds / 1e9 if one.weight_bytes else None,
                gflop_s=one.flops / one.seconds / 1e9 if one.flops else None,
            )
            for name, one in self._clock.times.items()
        ]
        return StepProfile(
            kind=kind,
            rows=rows,
            tokens=tokens,
            steps=steps,
            step_us=step_s * 1e6 / steps,
            untimed_us=untimed_s * 1e6 / steps,
            ops=tuple(sorted(lines, key=lambda line: -line.us)),
            host={name: seconds * 1e6 / steps for name, seconds in self._seconds.items()},
        )


def _to_text(detokenizer: Detokenizer, batch: TokenBatch) -> None:
    detokenizer.take(batch)
    detokenizer.flush()
