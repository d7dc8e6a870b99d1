"""Runs requests through a whole engine in this process: scheduler, cache, runner and the platform under test.

It knows no reference: it gives back what each request got.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cardan.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from cardan.engine.core import EngineCore
from cardan.engine.messages import Generate
from cardan.engine.preparation import Prepared, prepare
from cardan.errors import UnsupportedError, UnsupportedModelError
from cardan.platform import Feature
from cardan.platform.refusals import check_layers
from cardan.scheduler import RequestOutput
from cardan.testing.conformance.check import CheckError, NotApplicableError, expect
from cardan.testing.conformance.subject import Subject
from cardan.testing.conformance.tiny_checkpoint import TinyCheckpoint
from cardan.testing.conformance.tiny_configs import CONTEXT, TINY_CONFIGS, VOCAB
from cardan.testing.conformance.watched_runner import WatchedRunner
from cardan.types import FinishKind, Float32Array, ForwardMode, LogprobParams, Pooling, SamplingParams, TokenLogprobs

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
        overlap: launch each step before the one before is read.
        mixed: decode rows ride in prefill passes.
        pool: tokens of the pool, or None for plenty.
        page: tokens per page, or None for the smallest that the platform takes.
        radix: whether prefixes are reused.
        graph: whether captured steps may be replayed.
        warm_ups: how often the runner warms up again before the first request.
        dtype: of activations and KV, or None for the one in which results are compared most closely.
    """

    name: str
    chunk: int = -1
    overlap: bool = False
    mixed: bool = False
    pool: int | None = None
    page: int | None = None
    radix: bool = True
    graph: bool = False
    warm_ups: int = 0
    dtype: str | None = None

    def check(self, subject: Subject) -> None:
        """Leave a check that runs in a way that the platform does not claim.

        Raises:
            NotApplicableError: with the platform's own reason.
        """
        wanted = {Feature.OVERLAP: self.overlap, Feature.MIXED_BATCH: self.mixed, Feature.GRAPH: self.graph}
        subject.needs(*(feature for feature, needed in wanted.items() if needed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request.

    Attributes:
        ids: the prompt.
        sampling: how tokens are chosen.
        logprobs: which are wanted.
        hidden_states: whether those of all tokens are wanted.
        pooling: which hidden states stand for the prompt, where one is wanted.
        embeds: vectors ``[tokens, hidden]`` that stand in the place of the ids.
    """

    ids: tuple[int, ...]
    sampling: SamplingParams
    logprobs: LogprobParams = field(default_factory=LogprobParams)
    hidden_states: bool = False
    pooling: Pooling | None = None
    embeds: Float32Array | None = field(default=None, compare=False)


@dataclass(slots=True)
class Answer:
    """What one request got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    hidden: list[Float32Array] = field(default_factory=list)
    embedding: tuple[float, ...] = ()
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
    """An engine over a tiny checkpoint; use it as a context manager.

    Attributes:
        prepared: what it runs on.
        runner: counts what becomes of its steps.
        core: the engine.
    """

    def __init__(self, subject: Subject, checkpoint: TinyCheckpoint, layout: Layout) -> None:
        """Prepare everything.

        Raises:
            NotApplicableError: the platform lacks what the layout or the model needs, and says so.
            CheckError: it refuses what it claims, or runs otherwise than it was asked to.
        """
        layout.check(subject)
        self._layout = layout
        with contextlib.ExitStack() as stack:
            prepared = _prepare(subject, checkpoint, _config(subject, checkpoint, layout))
            stack.callback(prepared.close)
            for name, wanted in (("graph", layout.graph), ("overlap", layout.overlap)):
                got = prepared.plan.value(name)
                expect(bool(got) is wanted, f"{layout.name}: the plan says {name} = {got}, asked for {wanted}")
            for _ in range(layout.warm_ups):
                prepared.runner.warm_up((1, 3, 8))
            self.runner = WatchedRunner(prepared.runner)
            self.prepared: Prepared = replace(prepared, runner=self.runner)
            self.core = EngineCore(self.prepared, NoStops())  # type: ignore[arg-type]
            self._held = stack.pop_all()

    def __enter__(self) -> EngineRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

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
                    hidden_states=request.hidden_states,
                    pooling=request.pooling,
                    embeds=None if request.embeds is None else request.embeds.tobytes(),
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
        answer.hidden.extend(np.frombuffer(state, np.float32) for state in output.hidden)
        answer.embedding = output.embedding or answer.embedding
        answer.cached = max(answer.cached, output.num_cached_tokens)
        reason = output.finish_reason
        if reason is not None:
            answer.finished = True
            if reason.kind in (FinishKind.ERROR, FinishKind.ABORT):
                raise CheckError(f"{self._layout.name}: request {output.rid} failed: {reason.message}")

    def check_layout(self, answers: Mapping[str, Answer]) -> None:
        """Make sure that the engine ran as it was laid out to.

        Raises:
            CheckError: it did not.
        """
        layout, runner = self._layout, self.runner
        wanted = 2 if layout.overlap else 1
        most = runner.most_in_flight
        expect(most == wanted, f"{layout.name}: at most {most} steps were in flight at once, expected {wanted}")
        cached = max((answer.cached for answer in answers.values()), default=0)
        expect(layout.radix or cached == 0, f"{layout.name}: a request had {cached} tokens in a cache that is off")
        expect(
            (self.replays > 0) is layout.graph,
            f"{layout.name}: {self.replays} steps were replayed, expected {'some' if layout.graph else 'none'}",
        )
        mixed = runner.steps[ForwardMode.MIXED]
        expect((mixed > 0) is layout.mixed, f"{layout.name}: {mixed} passes were mixed, asked for {layout.mixed}")
        page = self.prepared.plan.page_size
        expect(layout.page in (None, page), f"{layout.name}: pages have {page} tokens, asked for {layout.page}")
        longest, chunk = runner.most_extended, max(layout.chunk, page)
        expect(
            layout.chunk < 0 or layout.mixed or longest <= chunk,
            f"{layout.name}: a prefill pass had {longest} tokens, chunks have {chunk} at most",
        )

    @property
    def retractions(self) -> int:
        """How often a request lost its KV."""
        return int(self.core.stats().totals.get("retractions", 0))

    @property
    def replays(self) -> int:
        """How many steps the engine counts as replayed from a captured one."""
        return int(self.core.stats().totals.get("graph_replays", 0))


def _config(subject: Subject, checkpoint: TinyCheckpoint, layout: Layout) -> EngineConfig:
    page = layout.page or min(subject.capabilities.page_sizes)
    pool = max(layout.pool or ROOM, 9 * page if layout.pool else 32 * page)
    dtype = layout.dtype or subject.best_dtype
    return EngineConfig(
        model=ModelConfig(model=str(checkpoint.folder), dtype=dtype, context_length=CONTEXT),  # type: ignore[arg-type]
        platform=subject.platform_config(dtype, graph=layout.graph),
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


def _prepare(subject: Subject, checkpoint: TinyCheckpoint, config: EngineConfig) -> Prepared:
    """Open everything; a refusal is fine where a capability says so, or where a chip knows only its own models."""
    level = subject.level
    subject.release()
    try:
        check_layers(checkpoint.model.facts.layers, CONTEXT, subject.platform.name, subject.capabilities)
    except UnsupportedError as error:
        raise NotApplicableError(f"refused: {error}") from error
    try:
        return prepare(config, platform=subject.platform)
    except UnsupportedModelError as error:
        if level == 1:
            raise NotApplicableError(f"refused: {error}") from error
        raise CheckError(f"a device that supplies ops runs any model, but this one was refused: {error}") from error
    except UnsupportedError as error:
        raise CheckError(f"the platform claims all that the engine needs here, and refuses it: {error}") from error


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
