"""Grammars of the requests of one engine: which backend, when they are ready, and the masks of each step.

It knows no socket. Compiling happens in threads of ``cardan.grammar``; masks are made between two steps.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from cardan.config import GrammarConfig
from cardan.errors import CardanError
from cardan.grammar import (
    GRAMMAR_BACKENDS,
    NO_BACKEND,
    CompiledGrammar,
    FreeMask,
    GrammarBackend,
    GrammarCompiler,
    GrammarOptions,
    GrammarSession,
    GrammarVocabulary,
    MaskBuffers,
    choose_backend,
)
from cardan.platform import Capabilities, Feature, Plan, SettingSource
from cardan.scheduler import Request, Scheduled, SchedulerSettings
from cardan.text.tokenizer import Tokenizer


def with_grammars(plan: Plan, asked: GrammarConfig, capabilities: Capabilities) -> Plan:
    """A plan with the settings of grammars: ``grammar_backend``, ``jump_forward`` and what belongs to them.

    Args:
        plan: resolved but for this.
        asked: what the user set.
        capabilities: of the platform.

    Raises:
        ConfigError: the backend is unknown or not installed.
    """
    backend, why = choose_backend(asked.grammar_backend)
    defaults = GrammarConfig()
    source = SettingSource.DEFAULT if asked.grammar_backend == defaults.grammar_backend else SettingSource.FLAG
    if not capabilities.supports(Feature.GRAMMAR_MASK):
        backend, source = NO_BACKEND, SettingSource.PLATFORM
        why = f"the platform applies no masks: {capabilities.get(Feature.GRAMMAR_MASK).reason}"
    plan = plan.with_setting("grammar_backend", backend, source, why)
    jump = not asked.disable_jump_forward
    how = "forced tokens are computed in one pass" if jump else "--disable-jump-forward"
    plan = plan.with_setting("jump_forward", jump, SettingSource.DEFAULT if jump else SettingSource.FLAG, how)
    for name, value, default, why in (
        ("json_whitespace", asked.json_whitespace, defaults.json_whitespace, "between the tokens of JSON by a schema"),
        (
            "grammar_compile_timeout_s",
            asked.grammar_compile_timeout_s,
            defaults.grammar_compile_timeout_s,
            "bounds the compilation of one grammar",
        ),
    ):
        if value == default:
            plan = plan.with_setting(name, value, SettingSource.DEFAULT, why)
        else:
            plan = plan.with_setting(name, value, SettingSource.FLAG, "--" + name.replace("_", "-"))
    mixed = capabilities.supports(Feature.MIXED_BATCH)
    why = "rows of one token and of several may share a pass" if mixed else capabilities.get(Feature.MIXED_BATCH).reason
    return plan.with_setting("mixed_batch", mixed, SettingSource.PLATFORM, why)


def vocabulary_of(tokenizer: Tokenizer) -> GrammarVocabulary:
    """A tokenizer's vocabulary as grammars see it."""
    return GrammarVocabulary(
        tokens=[tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)],
        eos_ids=tokenizer.eos_ids,
        special_ids=tokenizer.special_ids,
        bos_id=tokenizer.bos_id,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


def make_grammars(plan: Plan, settings: SchedulerSettings, tokenizer: Tokenizer) -> Grammars | None:
    """What a plan says of grammars, or None where there is no backend. No library is imported yet."""
    name = str(plan.value("grammar_backend"))
    if name == NO_BACKEND:
        return None
    options = GrammarOptions(any_whitespace=plan.value("json_whitespace") == "any")

    def make() -> GrammarBackend:
        return GRAMMAR_BACKENDS[name].make(vocabulary_of(tokenizer), options)

    compiler = GrammarCompiler(make, float(plan.value("grammar_compile_timeout_s")))
    return Grammars(compiler, settings, tokenizer)


class Grammars:
    """Keeps requests that wait for their grammar, and makes the masks of those that run."""

    def __init__(self, compiler: GrammarCompiler, settings: SchedulerSettings, tokenizer: Tokenizer) -> None:
        """Bind a compiler; the tokenizer is asked nothing before the first grammar.

        Args:
            compiler: of the backend.
            settings: of the scheduler; the masks are as wide as the model's logits.
            tokenizer: the model's; ids of the model beyond its own are padding.
        """
        self._compiler = compiler
        self._settings = settings
        self._tokenizer = tokenizer
        self._waiting: dict[str, Request] = {}
        self._buffers = MaskBuffers(settings.max_running_requests, settings.vocab_size)

    @functools.cached_property
    def _free(self) -> FreeMask:
        vocab_size = self._settings.vocab_size
        return FreeMask(min(self._tokenizer.vocab_size, vocab_size), self._tokenizer.eos_ids, -(-vocab_size // 32))

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._waiting)

    def ask(self, request: Request) -> GrammarSession | None:
        """A request's grammar if it is compiled already; else ``take_ready`` will name the request.

        Raises:
            CardanError: the grammar was refused before.
        """
        assert request.params.grammar is not None
        compiled = self._compiler.submit(request.rid, request.params.grammar)
        if compiled is None:
            self._waiting[request.rid] = request
            return None
        return self._session(request, compiled)

    def forget(self, rid: str) -> None:
        """A request ended; it waits no more."""
        if self._waiting.pop(rid, None) is not None:
            self._compiler.cancel(rid)

    def take_ready(self) -> list[tuple[str, GrammarSession | CardanError]]:
        """Requests whose grammars are there, or were refused."""
        if not self._waiting:
            return []
        found: list[tuple[str, GrammarSession | CardanError]] = []
        for ready in self._compiler.take_ready():
            request = self._waiting.pop(ready.name, None)
            if request is None:
                continue
            result = ready.result
            found.append((ready.name, result if isinstance(result, CardanError) else self._session(request, result)))
        return found

    def masks(self, scheduled: Scheduled) -> npt.NDArray[np.uint32]:
        """Packed masks of a step's rows, once everything before it was committed."""
        return self._buffers.fill([request.grammar for request in scheduled.requests])

    def totals(self) -> Mapping[str, int]:
        """Counters of the compiler."""
        return self._compiler.totals()

    def _session(self, request: Request, compiled: CompiledGrammar) -> GrammarSession:
        spec = request.params.grammar
        assert spec is not None
        return GrammarSession(
            compiled.matcher(),
            self._free,
            starts_after=spec.starts_after,
            never_forced={*request.stop_ids, *request.params.logit_bias},
        )
