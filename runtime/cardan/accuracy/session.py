"""An engine in this process that sequences are run through as they are served: scheduler, cache, chunks, graphs.

It knows no file and no comparison. From one start it makes runs of several kinds over the same weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cardan.accuracy.cases import Case
from cardan.accuracy.scores import Greedy, Scores, score_rows
from cardan.accuracy.watching import Listener, watch
from cardan.config import EngineConfig
from cardan.engine.core import EngineCore
from cardan.engine.messages import Generate
from cardan.engine.preparation import Prepared, prepare, scheduler_settings
from cardan.errors import CardanError, UnsupportedError
from cardan.platform import Device, Feature, KVPool, LoadedModel, Plan, Platform, SettingSource
from cardan.scheduler import RequestOutput, SchedulerSettings
from cardan.types import FinishKind, KVLayout, LogprobParams, SamplingParams, TokenLogprobs

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it, and how much there is (0 when unknown)."""
NEEDED = {
    Feature.LOGPROBS: "to score what is decoded",
    Feature.PROMPT_LOGPROBS: "to score prompts",
    Feature.LOGIT_BIAS: "to force a text through decode steps",
}


class NoStops:
    """Stands in a tokenizer's place: the engine is fed ids and stops on none."""

    eos_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How sequences are run, where it is another way than the plan's.

    Attributes:
        name: for reports.
        batch: most requests at once; None for what the plan allows.
        copies: how often each sequence runs beside itself, to fill a batch.
        settings: settings of the plan that have other values; another ``kv_cache_dtype`` takes a pool of its own.
        loaded: weights that were loaded in another way, or None for the session's.
    """

    name: str
    batch: int | None = None
    copies: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    loaded: LoadedModel | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """What runs are made of.

    Attributes:
        prepared: plan, device, weights, pool and runner.
        layout: of the pool.
    """

    prepared: Prepared
    layout: KVLayout


@dataclass(slots=True)
class Received:
    """What one request got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    cached: int = 0


class Run:
    """One way of running over a session's weights."""

    def __init__(self, parts: Parts, way: Way, listener: Listener | None = None) -> None:
        """Make runner, scheduler and loop.

        Raises:
            UnsupportedError: a listener is wanted and the device shows nothing of its models.
        """
        prepared = parts.prepared
        loaded = way.loaded or prepared.loaded
        changed = dict(way.settings)
        if listener is not None:
            loaded, changed["graph"] = _watched(loaded, listener, prepared.plan.platform), False
        plan = changed_plan(prepared.plan, changed, way.name)
        settings = scheduler_settings(plan, parts.layout.num_groups)
        pool = prepared.pool
        if plan.kv_cache_dtype != parts.layout.dtype:
            layout = replace(parts.layout, dtype=plan.kv_cache_dtype)
            pool = allocate(prepared.device, layout, settings)
        if way.batch is not None:
            settings = replace(settings, max_running_requests=min(way.batch, settings.max_running_requests))
        self._own_runner = bool(changed) or loaded is not prepared.loaded
        runner = prepared.device.runner(loaded, pool, plan) if self._own_runner else prepared.runner
        self._way = way
        self._runner = runner
        self._core = EngineCore(replace(prepared, plan=plan, runner=runner, settings=settings), NoStops())  # type: ignore[arg-type]
        self._number = 0
        self.cached_tokens = 0
        """Prompt tokens that came from the cache so far."""

    def close(self) -> None:
        """Let go of a runner of its own."""
        if self._own_runner:
            self._runner.close()

    @property
    def totals(self) -> Mapping[str, int]:
        """The engine's counters."""
        return self._core.stats().totals

    def score(self, cases: Sequence[Case], top: int, progress: Progress | None = None) -> list[Scores]:
        """Scores of the sequences' own tokens, those after the prompt forced through decode steps."""
        found: dict[str, Scores] = {}
        total, done = sum(case.num_positions for case in cases), 0
        for wave in sorted({case.wave for case in cases}):
            these = [case for case in cases if case.wave == wave]
            for case, answer in zip(these, self._ask([self._scored(case, top) for case in these]), strict=True):
                entries = [entry for entry in answer.prompt_logprobs if entry is not None] + answer.logprobs
                found[case.name] = score_rows(entries, case.num_positions, case.name)
                self.cached_tokens += answer.cached
                done += case.num_positions
                if progress is not None:
                    progress("positions", done, total)
        return [found[case.name] for case in cases]

    def generate(self, cases: Sequence[Case]) -> list[Greedy]:
        """What the model itself goes on with after each prompt, greedily."""
        asks = [self._free(case) for case in cases]
        return [_greedy(answer) for answer in self._ask(asks)]

    def sample(
        self, prompt: Sequence[int], params: SamplingParams, seeds: Sequence[int], forced: tuple[int, ...] = ()
    ) -> list[list[int]]:
        """What is drawn for each seed after a prompt and forced tokens: ``params.max_new_tokens`` each."""
        count = len(forced) + params.max_new_tokens
        asks = [
            self._message(
                prompt, replace(params, max_new_tokens=count, ignore_eos=True, seed=seed), LogprobParams(), forced
            )
            for seed in seeds
        ]
        return [answer.tokens[len(forced) :] for answer in self._ask(asks, copies=1)]

    def _scored(self, case: Case, top: int) -> Generate:
        forced = case.ids[case.num_prompt :]
        start = case.score_from if case.num_prefill else None
        return self._message(
            case.ids[: case.num_prompt],
            SamplingParams(max_new_tokens=len(forced), temperature=0.0, ignore_eos=True),
            LogprobParams(output=True, prompt_start=start, top=top),
            forced,
        )

    def _free(self, case: Case) -> Generate:
        params = SamplingParams(max_new_tokens=case.greedy_tokens, temperature=0.0, ignore_eos=True)
        return self._message(case.ids[: case.num_prompt], params, LogprobParams(output=True, top=2))

    def _message(
        self, prompt: Sequence[int], params: SamplingParams, logprobs: LogprobParams, forced: tuple[int, ...] = ()
    ) -> Generate:
        self._number += 1
        return Generate(
            wire_id=f"accuracy-{self._number}",
            prompt_ids=list(prompt),
            sampling=params,
            logprobs=logprobs,
            priority=0,
            cache_salt=None,
            routing_key=None,
            arrival_s=0.0,
            forced_output_ids=forced,
        )

    def _ask(self, asks: Sequence[Generate], copies: int | None = None) -> list[Received]:
        """Run requests together to their ends, each beside copies of itself that share no cached prefix with it."""
        answers = {ask.wire_id: Received() for ask in asks}
        copies = self._way.copies if copies is None else copies
        for ask in asks:
            self._core.add(ask)
            for copy in range(1, copies):
                self._core.add(_copied(ask, copy))
        while self._core.has_work:
            self._core.turn()
            for news in self._core.take_news():
                for rid, tokens in zip(news.rids, news.token_ids, strict=True):
                    if rid in answers:
                        answers[rid].tokens.append(tokens)
                for output in news.detailed:
                    _take(answers.get(output.rid, Received()), output)
        return list(answers.values())


def changed_plan(plan: Plan, changes: Mapping[str, Any], way: str) -> Plan:
    """A plan in which some settings have other values."""
    for name, value in changes.items():
        plan = plan.with_setting(name, value, SettingSource.FLAG, f"the way {way!r}")
    return plan


def allocate(device: Device, layout: KVLayout, settings: SchedulerSettings) -> KVPool:
    """A pool for a scheduler's settings."""
    return device.allocate_kv(
        layout, settings.num_slots + settings.page_size, settings.num_rows, settings.context_length
    )


def _watched(loaded: LoadedModel, listener: Listener, platform: str) -> LoadedModel:
    watched = watch(loaded, listener)
    if watched is None:
        raise UnsupportedError(
            f"Platform {platform!r} runs models by itself, so results of layers cannot be seen. "
            "Leave out what needs them."
        )
    return watched


def _copied(ask: Generate, copy: int) -> Generate:
    fields = {name: getattr(ask, name) for name in ask.__struct_fields__}
    return Generate(**{**fields, "wire_id": f"{ask.wire_id}.{copy}", "cache_salt": f"copy {copy}"})


def _take(answer: Received, output: RequestOutput) -> None:
    answer.tokens.extend(output.new_token_ids)
    answer.logprobs.extend(output.logprobs)
    answer.prompt_logprobs.extend(output.prompt_logprobs)
    answer.cached = max(answer.cached, output.num_cached_tokens)
    reason = output.finish_reason
    if reason is not None and reason.kind in (FinishKind.ERROR, FinishKind.ABORT):
        raise CardanError(f"A measured request failed: {reason.message}")


def _greedy(answer: Received) -> Greedy:
    entries = [entry for entry in answer.logprobs if entry is not None]
    margins = [entry.top[0][1] - entry.top[1][1] if len(entry.top) > 1 else np.inf for entry in entries]
    return Greedy(
        ids=np.asarray(answer.tokens, np.int32),
        logprobs=np.asarray([entry.logprob for entry in entries], np.float32),
        margins=np.asarray(margins, np.float32),
    )


class Session:
    """A prepared engine; use it as a context manager.

    Attributes:
        prepared: what it runs on.
        layout: of its KV pool.
    """

    def __init__(
        self, config: EngineConfig, progress: Progress | None = None, platform: Platform | None = None
    ) -> None:
        """Prepare everything.

        Args:
            config: what was asked for.
            progress: told how far the start is.
            platform: taken instead of the one that the config names.

        Raises:
            CardanError: the model, the platform, a setting or the memory is refused.
            UnsupportedError: the platform gives no logprobs.
        """
        with contextlib.ExitStack() as stack:
            keywords = {} if progress is None else {"progress": progress}
            self.prepared: Prepared = prepare(config, platform=platform, **keywords)
            stack.callback(self.prepared.close)
            plan = self.plan
            self.layout = KVLayout(layers=plan.model.layers, page_size=plan.page_size, dtype=plan.kv_cache_dtype)
            opened = self.prepared.opened
            self.capabilities = opened.platform.capabilities(plan.device)
            for feature, why in NEEDED.items():
                if not self.capabilities.supports(feature):
                    raise UnsupportedError(
                        f"Platform {plan.platform!r} does not support {feature}, which is needed {why}: "
                        f"{self.capabilities.get(feature).reason}. Record on another platform."
                    )
            self._held = stack.pop_all()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @property
    def plan(self) -> Plan:
        """Every setting, resolved and measured."""
        return self.prepared.plan

    @contextlib.contextmanager
    def run(self, way: Way | None = None, listener: Listener | None = None) -> Iterator[Run]:
        """A run with an empty cache; it ends with the context.

        Raises:
            UnsupportedError: a listener is wanted and the device shows nothing of its models.
        """
        made = Run(Parts(self.prepared, self.layout), way or Way(name="as configured"), listener)
        try:
            yield made
        finally:
            made.close()
