"""Runs requests through a whole engine in this process: scheduler, cache, runner and the platform under test.

It knows no reference: it gives back what each request got.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig
from cardan.engine.core import EngineCore
from cardan.engine.messages import Generate
from cardan.engine.preparation import Prepared, prepare
from cardan.errors import UnsupportedError, UnsupportedModelError
from cardan.platform import Feature, SettingSource
from cardan.scheduler import RequestOutput
from cardan.testing.conformance.check import CheckError, NotApplicableError, expect
from cardan.testing.conformance.subject import Subject
from cardan.testing.conformance.tiny_checkpoint import TinyCheckpoint
from cardan.testing.conformance.tiny_configs import CONTEXT, TINY_CONFIGS, VOCAB
from cardan.types import FinishKind, LogprobParams, SamplingParams, TokenLogprobs

ROOM = 4096
"""Tokens of the pool where it is not meant to be short."""
MAX_TURNS = 20_000


class NoStops:
    """Stands in a tokenizer's place: the engine is fed ids and never stops on one."""

    eos_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the engine runs; what it answers must not depend on it.

    Attributes:
        name: for messages.
        chunk: most tokens of a prefill pass, -1 for no chunks.
        overlap: launch each step before the one before is read; None leaves it to the plan.
        mixed: decode rows ride in prefill passes.
        pool: tokens of the pool, or None for plenty.
        page: tokens per page, or None for the smallest that the platform takes.
        radix: whether prefixes are reused.
        graph: whether captured steps may be replayed.
        warm_ups: how often the runner warms up again before the first request.
    """

    name: str
    chunk: int = -1
    overlap: bool | None = False
    mixed: bool = False
    pool: int | None = None
    page: int | None = None
    radix: bool = True
    graph: bool = False
    warm_ups: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request.

    Attributes:
        ids: the prompt.
        sampling: how tokens are chosen.
        logprobs: which are wanted.
    """

    ids: tuple[int, ...]
    sampling: SamplingParams
    logprobs: LogprobParams = field(default_factory=LogprobParams)


@dataclass(slots=True)
class Answer:
    """What one request got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    cached: int = 0
    finished: bool = False


def tiny(subject: Subject, architecture: str = "LlamaForCausalLM") -> TinyCheckpoint:
    """The tiny checkpoint of an architecture, written once."""
    key = f"checkpoint:{architecture}"
    if key not in subject.memo:
        config = TINY_CONFIGS.get(architecture)
        if config is None:
            raise NotApplicableError(f"no tiny config of {architecture} is known; its plugin adds one to TINY_CONFIGS")
        subject.memo[key] = TinyCheckpoint(subject.folder / architecture, config)
    found: TinyCheckpoint = subject.memo[key]
    return found


class EngineRun:
    """An engine over a tiny checkpoint; use it as a context manager."""

    def __init__(self, subject: Subject, checkpoint: TinyCheckpoint, layout: Layout) -> None:
        """Prepare everything.

        Raises:
            NotApplicableError: the platform lacks what the layout or the model needs, and says so.
        """
        subject.release()
        self._layout = layout
        self._needed(subject)
        config = self._config(subject, checkpoint)
        try:
            self.prepared: Prepared = prepare(config, platform=subject.platform)
        except (UnsupportedError, UnsupportedModelError) as error:
            raise NotApplicableError(f"refused: {error}") from error
        if layout.overlap:
            plan = self.prepared.plan.with_setting("overlap", True, SettingSource.FLAG, "asked for by the suite")
            self.prepared = replace(self.prepared, plan=plan)
        for _ in range(layout.warm_ups):
            self.prepared.runner.warm_up((1, 3, 8))
        self.core = EngineCore(self.prepared, NoStops())  # type: ignore[arg-type]

    def __enter__(self) -> EngineRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.prepared.close()

    def _needed(self, subject: Subject) -> None:
        wanted = {
            Feature.OVERLAP: bool(self._layout.overlap),
            Feature.MIXED_BATCH: self._layout.mixed,
            Feature.GRAPH: self._layout.graph,
        }
        for feature, needed in wanted.items():
            if needed and not subject.capabilities.supports(feature):
                raise NotApplicableError(f"{feature} is not supported: {subject.capabilities.get(feature).reason}")

    def _config(self, subject: Subject, checkpoint: TinyCheckpoint) -> EngineConfig:
        layout = self._layout
        page = layout.page or min(subject.capabilities.page_sizes)
        pool = max(layout.pool or ROOM, 9 * page if layout.pool else 32 * page)
        return EngineConfig(
            model=ModelConfig(
                model=str(checkpoint.folder),
                dtype=subject.best_dtype,  # type: ignore[arg-type]
                context_length=CONTEXT,
            ),
            platform=PlatformConfig(
                platform=subject.platform.name,
                kv_cache_dtype=subject.best_kv_dtype,
                disable_graph=not layout.graph,
                options=subject.option_texts,
            ),
            cache=CacheConfig(
                max_total_tokens=-(-pool // page) * page, page_size=page, disable_radix_cache=not layout.radix
            ),
            scheduler=SchedulerConfig(
                chunked_prefill_size=layout.chunk if layout.chunk < 0 else max(layout.chunk, page),
                disable_overlap_schedule=not layout.overlap,
                enable_mixed_chunk=layout.mixed,
                max_running_requests=16 if pool >= 16 * page else pool // page,
                schedule_conservativeness=0.05,
                random_seed=1,
            ),
        )

    def ask(self, requests: Mapping[str, Ask]) -> dict[str, Answer]:
        """Run requests together to their ends.

        Raises:
            CheckError: one fails or never ends.
        """
        answers = {rid: Answer() for rid in requests}
        for rid, request in requests.items():
            self.core.add(
                Generate(
                    wire_id=rid,
                    prompt_ids=list(request.ids),
                    sampling=request.sampling,
                    logprobs=request.logprobs,
                    priority=0,
                    cache_salt=None,
                    routing_key=None,
                    arrival_s=0.0,
                )
            )
        for _ in range(MAX_TURNS):
            if not self.core.has_work:
                break
            self.core.turn()
            for news in self.core.take_news():
                for rid, token in zip(news.rids, news.token_ids, strict=True):
                    answers[rid].tokens.append(int(token))
                for output in news.detailed:
                    self._take(answers[output.rid], output)
        self.core.scheduler.check_invariants()
        unfinished = [rid for rid, answer in answers.items() if not answer.finished]
        expect(not unfinished, f"{self._layout.name}: requests {unfinished} never ended")
        return answers

    def _take(self, answer: Answer, output: RequestOutput) -> None:
        answer.tokens.extend(output.new_token_ids)
        answer.logprobs.extend(output.logprobs)
        answer.prompt_logprobs.extend(output.prompt_logprobs)
        answer.cached = max(answer.cached, output.num_cached_tokens)
        reason = output.finish_reason
        if reason is not None:
            answer.finished = True
            if reason.kind in (FinishKind.ERROR, FinishKind.ABORT):
                raise CheckError(f"{self._layout.name}: request {output.rid} failed: {reason.message}")

    @property
    def retractions(self) -> int:
        """How often a request lost its KV."""
        return int(self.core.stats().totals.get("retractions", 0))


def prompts(seed: int = 1) -> dict[str, tuple[int, ...]]:
    """Prompts of many lengths, a third of which share a prefix."""
    rng = np.random.default_rng(seed)
    common = rng.integers(3, VOCAB, 37)
    alone = [rng.integers(3, VOCAB, length) for length in (1, 2, 3, 8, 17, 31, 40, 63)]
    sharing = [np.concatenate((common, rng.integers(3, VOCAB, length))) for length in (1, 2, 5, 21)]
    return {f"r{index}": tuple(int(i) for i in ids) for index, ids in enumerate((*alone, *sharing))}


def logprob_params(subject: Subject, *, prompt: bool = False) -> LogprobParams:
    """Whole distributions where the platform gives logprobs."""
    if not subject.capabilities.supports(Feature.LOGPROBS) or not subject.platform.reads_weights:
        return LogprobParams()
    with_prompt = prompt and subject.capabilities.supports(Feature.PROMPT_LOGPROBS)
    return LogprobParams(output=True, top=VOCAB, prompt_start=0 if with_prompt else None)


def greedy(subject: Subject, new_tokens: int, *, prompt: bool = False) -> dict[str, Any]:
    """Fields of a greedy request."""
    return {
        "sampling": SamplingParams(max_new_tokens=new_tokens, temperature=0.0),
        "logprobs": logprob_params(subject, prompt=prompt),
    }


def run_layout(
    subject: Subject, layout: Layout, architecture: str = "LlamaForCausalLM", new_tokens: int = 24
) -> dict[str, Answer]:
    """Run the prompts greedily under a layout and hold the answers to the reference."""
    from cardan.testing.conformance.parity import hold_all

    checkpoint = tiny(subject, architecture)
    requests = {rid: Ask(ids=ids, **greedy(subject, new_tokens)) for rid, ids in prompts().items()}
    with EngineRun(subject, checkpoint, layout) as run:
        answers = run.ask(requests)
    hold_all(subject, checkpoint, requests, answers, layout.name)
    return answers
