"""Compiles grammars beside the scheduler: in threads, each grammar once, failures remembered, none waited for too long.

It knows no request and no scheduler: what is ready is fetched between two steps.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue

from cardan.errors import CardanError, EngineBusyError, RequestError
from cardan.grammar.backend import CompiledGrammar, GrammarBackend
from cardan.grammar.limits import refused_grammar
from cardan.grammar_spec import GrammarSpec

NUM_THREADS = 2
"""Grammars that are compiled at a time."""
MAX_CACHED = 256
"""Grammars and failures that are kept, least recently used first to go."""
MAX_LOST_THREADS = 4
"""Compilations that may run on after their time is over; beyond them no more is begun."""

BACKEND_TIMEOUT_S = 120.0
"""Longest time that grammars wait for the backend to be made, which reads the whole vocabulary."""

STACK_BYTES = 512 * 2**20
"""Stack of a compiling thread, reserved and not used: compilers recurse over chains of rules."""

Key = tuple[str, str, bool]


@dataclass(slots=True)
class _Entry:
    """One grammar, compiled or on its way.

    Attributes:
        spec: the grammar.
        waiting: ids of those who wait for it.
        started_s: when a thread began to compile it, or None.
        result: the compiled grammar or the error, once there is one.
        given_up: it took too long.
        ended: the thread has come back from it.
    """

    spec: GrammarSpec
    waiting: list[str] = field(default_factory=list)
    started_s: float | None = None
    result: CompiledGrammar | CardanError | None = None
    given_up: bool = False
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """A grammar that one request waited for.

    Attributes:
        name: of who waited.
        result: the compiled grammar, or why there is none.
    """

    name: str
    result: CompiledGrammar | CardanError


class GrammarCompiler:
    """Compiles in daemon threads, so that one that never ends does not keep the process."""

    def __init__(self, make: Callable[[], GrammarBackend], timeout_s: float) -> None:
        """Prepare; the backend is made by the first thread that needs it.

        Args:
            make: makes the backend.
            timeout_s: longest time of one compilation.
        """
        self._make = make
        self._timeout_s = timeout_s
        self._backend: GrammarBackend | None = None
        self._backend_lock = threading.Lock()
        self._making_since_s: float | None = None
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._jobs: SimpleQueue[_Entry | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[_Entry, CompiledGrammar | CardanError]] = SimpleQueue()
        self._ready: list[Ready] = []
        self._num_threads = 0
        self._lost = 0
        self._lock = threading.Lock()  # a compilation either ends in time or is given up
        self._totals: Counter[str] = Counter()
        self._compile_s = 0.0

    def submit(self, name: str, spec: GrammarSpec) -> CompiledGrammar | None:
        """Ask for a grammar. Returns it if it is there; else ``take_ready`` will name ``name``.

        Raises:
            CardanError: it failed before.
            EngineBusyError: too many compilations hang, or the backend does.
        """
        self._take_done()
        self._give_up_backend()
        key = (str(spec.kind), spec.text, spec.allow_unenforced)
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            self._totals["grammar_cache_hits"] += 1
        else:
            if self._backend_is_late():
                raise _late_backend()
            if self._lost >= MAX_LOST_THREADS:
                raise EngineBusyError(
                    f"{self._lost} other grammars are still being compiled after their time "
                    "(--grammar-compile-timeout-s), so no more is begun. Try again later."
                )
            entry = self._entries[key] = _Entry(spec)
            self._begin(entry)
            self._forget_old()
        if isinstance(entry.result, CardanError):
            raise _copy(entry.result)
        if entry.result is None:
            entry.waiting.append(name)
        return entry.result

    def cancel(self, name: str) -> None:
        """Somebody waits no more."""
        for entry in self._entries.values():
            if name in entry.waiting:
                entry.waiting.remove(name)

    def take_ready(self) -> list[Ready]:
        """Who has waited long enough: their grammar is compiled, or failed, or took too long."""
        self._take_done()
        self._give_up_backend()
        now_s = time.monotonic()
        for entry in self._entries.values():
            started_s = entry.started_s
            if entry.result is None and started_s is not None and now_s - started_s > self._timeout_s:
                self._give_up(entry)
        ready, self._ready = self._ready, []
        return ready

    @property
    def num_pending(self) -> int:
        """Grammars that are being compiled or wait for a thread."""
        return sum(entry.result is None for entry in self._entries.values())

    def totals(self) -> Mapping[str, int]:
        """Counters: ``grammar_compiled``, ``grammar_failed``, ``grammar_cache_hits``, ``grammar_compile_ms``."""
        return {**self._totals, "grammar_compile_ms": int(self._compile_s * 1000)}

    def close(self) -> None:
        """Let idle threads end."""
        for _ in range(self._num_threads):
            self._jobs.put(None)
        self._num_threads = 0

    # --- inside ---

    def _begin(self, entry: _Entry) -> None:
        self._jobs.put(entry)
        if self._num_threads < NUM_THREADS:
            self._start_thread()

    def _start_thread(self) -> None:
        self._num_threads += 1
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=self._work, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            begun_s = time.monotonic()
            result = self._compile(entry)
            self._compile_s += time.monotonic() - begun_s
            self._done.put((entry, result))
            with self._lock:
                entry.ended = True
                if entry.given_up:  # and so was this thread
                    self._lost -= 1
                    return

    def _compile(self, entry: _Entry) -> CompiledGrammar | CardanError:
        try:
            backend = self._made_backend()
            if isinstance(entry.result, CardanError):
                return entry.result  # nobody waits for it any more
            entry.started_s = time.monotonic()  # reading the vocabulary is no fault of the first grammar's
            return backend.compile(entry.spec)
        except CardanError as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises fails the grammar, not the server
            return refused_grammar(entry.spec, f"the compiler failed ({type(error).__name__}: {error})")

    def _made_backend(self) -> GrammarBackend:
        with self._backend_lock:
            if self._backend is None:
                self._making_since_s = time.monotonic()
                try:
                    self._backend = self._make()
                finally:
                    with self._lock:
                        self._making_since_s = None
            return self._backend

    def _backend_is_late(self) -> bool:
        since_s = self._making_since_s
        return since_s is not None and time.monotonic() - since_s > BACKEND_TIMEOUT_S

    def _give_up_backend(self) -> None:
        """Fail all grammars that wait for a backend whose time is over, and forget them: it may come after all."""
        with self._lock:
            if not self._backend_is_late():
                return
            left = {key: entry for key, entry in self._entries.items() if entry.result is None}
            for key, entry in left.items():
                entry.result = _late_backend()
                del self._entries[key]
        self._totals["grammar_failed"] += len(left)
        for entry in left.values():
            self._hand_out(entry)

    def _take_done(self) -> None:
        while not self._done.empty():
            self._finish(*self._done.get())

    def _finish(self, entry: _Entry, result: CompiledGrammar | CardanError) -> None:
        """Keep what a thread made; one that came late is there for those who ask again, and was counted before."""
        if entry.result is None:
            self._totals["grammar_failed" if isinstance(result, CardanError) else "grammar_compiled"] += 1
        entry.result = result
        self._hand_out(entry)

    def _give_up(self, entry: _Entry) -> None:
        """Fail a grammar whose time is over; its thread is replaced, and ends when it comes back."""
        with self._lock:
            if entry.ended:
                return  # just now; the result is among those that are done
            self._lost += 1
            entry.given_up = True
        self._num_threads -= 1
        entry.result = refused_grammar(
            entry.spec,
            f"compiling it took longer than {self._timeout_s:g} s (--grammar-compile-timeout-s); make it simpler",
        )
        self._totals["grammar_failed"] += 1
        self._hand_out(entry)
        if not self._jobs.empty():
            self._start_thread()

    def _hand_out(self, entry: _Entry) -> None:
        result = entry.result
        assert result is not None
        for name in entry.waiting:
            self._ready.append(Ready(name, _copy(result) if isinstance(result, CardanError) else result))
        entry.waiting.clear()
        self._forget_old()

    def _forget_old(self) -> None:
        for key in list(self._entries):
            if len(self._entries) <= MAX_CACHED:
                return
            if self._entries[key].result is not None:
                del self._entries[key]


def _late_backend() -> EngineBusyError:
    return EngineBusyError(
        f"The grammar backend is still being made after {BACKEND_TIMEOUT_S:g} s, so no grammar can be compiled. Try "
        "again later, or start the server with another --grammar-backend."
    )


def _copy(error: CardanError) -> CardanError:
    """An error of its own for each: one that is raised many times keeps every traceback."""
    if isinstance(error, RequestError):
        return RequestError(str(error), param=error.param, code=error.code)
    return type(error)(*error.args)
