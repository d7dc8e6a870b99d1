"""The engine within one process: a scheduler and a runner, turned by one of two loops.

It knows no socket and no text beyond the stop checkers that it builds for the scheduler.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from cardan.engine.api import EngineStats
from cardan.engine.grammars import make_grammars
from cardan.engine.input_embeds import read_vectors
from cardan.engine.logit_processors import LogitProcessor, LogitProcessors
from cardan.engine.loops import LoopState, overlapped_turn, plain_turn
from cardan.engine.messages import Generate
from cardan.engine.preparation import Prepared
from cardan.engine.profiling import Profiler
from cardan.errors import CardanError
from cardan.scheduler import DecodeLogged, OutputBatch, Request, Scheduler
from cardan.text.stops import build_stop_checker
from cardan.text.tokenizer import Tokenizer

_PRESSURE_INTERVAL_S = 1.0
"""How often memory pressure is asked for."""
_PRESSURE_SHARE = 0.25
"""Share of the pool's cached prefixes given up each time memory is short."""

logger = logging.getLogger(__name__)


class EngineCore:
    """Runs requests: ``add`` and ``abort`` them, call ``turn`` while ``has_work``."""

    def __init__(
        self,
        prepared: Prepared,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
        profile_folder: str | None = None,
        processors: LogitProcessors | None = None,
    ) -> None:
        self._device = prepared.device
        self._tokenizer = tokenizer
        self._clock = clock
        self.scheduler = Scheduler(prepared.settings)
        self._grammars = make_grammars(prepared.plan, prepared.settings, tokenizer)
        self._processors = processors
        self._loop = LoopState(
            self.scheduler, prepared.runner, grammar=self._grammars, clock=clock, processors=processors
        )
        overlap = prepared.plan.settings["overlap"]
        self._turn = overlapped_turn if overlap.value else plain_turn
        self._profiler = Profiler(profile_folder)
        self._news: list[OutputBatch] = []
        self._totals: Counter[str] = Counter()
        self._graph = bool(prepared.plan.value("graph"))
        self._pressure_asked_s = clock()
        if not overlap.value:
            self._fall_back(f"plain loop ({overlap.why})")

    @property
    def has_work(self) -> bool:
        """Whether a turn could do anything."""
        return self.scheduler.has_work or self._loop.in_flight is not None

    def add(self, message: Generate) -> None:
        """Queue a choice.

        Raises:
            RequestError: the prompt is too long, or the grammar is wrong.
            QueueFullError: too many requests wait.
        """
        eos_ids = self._tokenizer.eos_ids
        request = Request(
            rid=message.wire_id,
            prompt_ids=message.prompt_ids,
            params=message.sampling,
            logprobs=message.logprobs,
            stop=build_stop_checker(message.sampling, eos_ids, self._tokenizer),
            priority=message.priority,
            cache_salt=message.cache_salt,
            routing_key=message.routing_key,
            arrival_s=message.arrival_s,
            truncated_from=message.truncated_from,
            pooling=message.pooling,
            hidden_states=message.hidden_states,
            embeds=read_vectors(message.embeds, len(message.prompt_ids)),
            forced_output_ids=message.forced_output_ids,
            processor=self._processor(message.processor),
            eos_ids=eos_ids,
            needs_grammar=message.sampling.grammar is not None,
        )
        if request.needs_grammar:
            self._add_with_grammar(request)
        else:
            self.scheduler.add(request)

    def _processor(self, asked: tuple[str, str] | None) -> LogitProcessor | None:
        if asked is None:
            return None
        assert self._processors is not None, "requests with a processor are refused where they are off"
        return self._processors.make(*asked)

    def _add_with_grammar(self, request: Request) -> None:
        assert self._grammars is not None, "requests with a grammar are refused where there is no backend"
        grammar = self._grammars.ask(request)
        try:
            self.scheduler.add(request)
        except CardanError:
            self._grammars.forget(request.rid)
            raise
        if grammar is not None:
            self.scheduler.grammar_ready(request.rid, grammar)

    def abort(self, wire_id: str | None) -> None:
        """Abort one choice, or all for None; unknown ids are ignored. Their last news come with the next turn."""
        for ended in self.scheduler.abort(wire_id):
            if self._grammars is not None:
                self._grammars.forget(ended)

    @property
    def awaits_grammars(self) -> bool:
        """Whether requests wait for their grammars."""
        return self._grammars is not None and self._grammars.num_waiting > 0

    def take_grammars(self) -> list[tuple[str, CardanError]]:
        """Let requests run whose grammars have been compiled.

        Returns:
            Those whose grammars were refused, and why; their end is among the news as well.
        """
        if self._grammars is None:
            return []
        refused: list[tuple[str, CardanError]] = []
        for rid, result in self._grammars.take_ready():
            if isinstance(result, CardanError):
                self.scheduler.grammar_failed(rid, str(result))
                refused.append((rid, result))
            else:
                self.scheduler.grammar_ready(rid, result)
        return refused

    def turn(self) -> bool:
        """Run one turn of the loop and log what happened. Returns whether anything was launched or read."""
        reading = self._loop.in_flight is not None
        read = self._turn(self._loop)
        for news in (read, self.scheduler.take_outputs()):
            if news:
                self._news.append(news)
        self._log_events()
        self._relieve_pressure()
        if self._profiler.ended(self._loop):
            self._end_profile()
        return read is not None or reading or self._loop.in_flight is not None

    def take_news(self) -> list[OutputBatch]:
        """News since the last call, in order; those of aborts are among them."""
        news, self._news = self._news, []
        return news

    def flush_cache(self) -> bool:
        """Empty the prefix cache. Returns False when requests were running, and then nothing was done."""
        return not self.has_work and self.scheduler.flush_cache()

    def start_profile(self, num_steps: int | None) -> None:
        """Record what each step does, for ``num_steps`` or until ``stop_profile``.

        Raises:
            RequestError: there is no folder for it, or a recording is under way.
        """
        self._loop = self._profiler.start(self._loop, num_steps)

    def stop_profile(self) -> str:
        """End the recording and write it. Returns where.

        Raises:
            RequestError: there is no recording, or it could not be written.
        """
        self._loop, trace = self._profiler.stop(self._loop)
        path = str(trace.write())
        logger.info("The profile of %d steps is in %s", trace.num_steps, path)
        return path

    def _end_profile(self) -> None:
        try:
            self.stop_profile()
        except CardanError as error:
            logger.error("%s", error)

    def stats(self) -> EngineStats:
        """Gauges and totals as of now."""
        stats = self.scheduler.stats()
        replays = {"graph_replays": self._loop.num_replays} if self._graph else {}
        grammars = {} if self._grammars is None else self._grammars.totals()
        return EngineStats(
            num_running=stats.num_running,
            num_queued=stats.num_queued,
            num_grammar_queued=stats.num_grammar_queued,
            used_tokens=stats.used_tokens,
            cached_tokens=stats.cached_tokens,
            max_total_tokens=stats.max_total_tokens,
            totals={**stats.totals, **self._totals, **replays, **grammars},
            gen_throughput=stats.gen_throughput,
        )

    def _log_events(self) -> None:
        for event in self.scheduler.take_events():
            logger.info("%s", event.describe(isinstance(event, DecodeLogged) and self._loop.last_replayed))

    def _fall_back(self, reason: str) -> None:
        self._totals[f"fallback:{reason}"] += 1
        logger.info("Fallback: %s", reason)

    def _relieve_pressure(self) -> None:
        now_s = self._clock()
        if now_s - self._pressure_asked_s < _PRESSURE_INTERVAL_S:
            return
        self._pressure_asked_s = now_s
        if not self._device.under_pressure():
            return
        evicted = self.scheduler.evict_cache(int(_PRESSURE_SHARE * self.scheduler.settings.num_slots))
        self._totals["pressure_evictions"] += 1
        logger.warning("Memory of %s is short: gave up %d cached tokens.", self._device.info.name, evicted)
