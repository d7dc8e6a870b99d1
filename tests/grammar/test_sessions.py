"""One request's way through a grammar, the masks of a step, and compiling beside the scheduler."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from grammar_words import EOS, WORDS_TOKENIZER, allowed, spec, vocabulary

from cardan.errors import EngineBusyError, RequestError
from cardan.grammar import GRAMMAR_BACKENDS, FreeMask, GrammarCompiler, GrammarOptions, GrammarSession, MaskBuffers
from cardan.grammar import compiler as compiling
from cardan.grammar import session as sessions

FREE = FreeMask(vocabulary().size, {EOS}, -(-vocabulary().size // 32) + 1)


def session(backend: Any, pattern: str, **changes: Any) -> GrammarSession:
    return GrammarSession(backend.compile(spec("regex", pattern)).matcher(), FREE, **changes)


def test_forced_tokens_are_the_only_ones_allowed_and_kept_to(backend: Any) -> None:
    follows = session(backend, "hello the [0-9]+z")
    while follows.forced:
        token = follows.forced[0]
        assert allowed(follows) == {token}
        assert follows.accept(token)
    assert allowed(follows)
    assert follows.error is None


def test_another_token_than_the_forced_one_is_an_error(backend: Any) -> None:
    follows = session(backend, "hello the [0-9]+z")
    assert follows.forced
    assert not follows.accept(WORDS_TOKENIZER.encode("h")[0])
    assert follows.error == "the mask that forbids it was not applied"
    assert allowed(follows) == set()
    assert not follows.accept(follows.forced[0])
    assert not follows.complete


def test_tokens_that_end_a_request_or_are_biased_are_not_forced(backend: Any) -> None:
    first = session(backend, "hello the [0-9]+z").forced[0]
    assert not session(backend, "hello the [0-9]+z", never_forced={first}).forced


def test_a_grammar_begins_behind_the_thinking(backend: Any) -> None:
    after = WORDS_TOKENIZER.encode("\n\ntion")
    follows = session(backend, "ab+", starts_after=after)
    everything = set(range(vocabulary().size)) - {EOS}
    for token in [*WORDS_TOKENIZER.encode("anything"), after[0], after[0]]:
        assert allowed(follows) == everything
        assert follows.accept(token)
        assert not follows.complete
    assert follows.accept(after[1])
    assert allowed(follows) < everything
    assert not follows.accept(WORDS_TOKENIZER.encode("x")[0])


def test_a_token_that_takes_too_long_ends_the_request(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_STEP_S", -1.0)
    follows = session(backend, "[a-z]+")
    assert allowed(follows) == set()
    assert follows.error is not None
    assert "took longer than" in follows.error


def test_masks_of_two_steps_do_not_share_memory(backend: Any) -> None:
    buffers = MaskBuffers(3, vocabulary().size + 40)
    follows = session(backend, "[0-9]+")
    first = buffers.fill([follows, None])
    kept = first.copy()
    follows.accept(WORDS_TOKENIZER.encode("1")[0])
    second = buffers.fill([None, follows])
    assert (first == kept).all()
    assert first.shape == (2, -(-(vocabulary().size + 40) // 32))
    assert (first[1] == 0xFFFFFFFF).all()
    assert (second[0] == 0xFFFFFFFF).all()
    assert (second[1] != first[0]).any()
    bits = np.unpackbits(first[0].view(np.uint8), bitorder="little")
    assert not bits[vocabulary().size :].any()


# --- compiling ---


class Slow:
    """A backend that waits, and fails or hangs when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.compiled: list[str] = []

    def compile(self, asked: Any) -> Any:
        self.compiled.append(asked.text)
        assert self.go.wait(20)
        if asked.text == "bad":
            raise RequestError("no such rule", param="regex")
        if asked.text == "worse":
            raise RuntimeError("bug")
        return asked.text


def wait_ready(compiler: GrammarCompiler, count: int) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + 20
    while len(found) < count and time.monotonic() < deadline:
        found += compiler.take_ready()
        time.sleep(0.002)
    return found


def test_each_grammar_is_compiled_once_for_all_who_wait() -> None:
    slow = Slow()
    compiler = GrammarCompiler(lambda: slow, 10)
    asked = spec("regex", "a")
    assert compiler.submit("r1", asked) is None
    assert compiler.submit("r2", asked) is None
    assert compiler.submit("gone", asked) is None
    compiler.cancel("gone")
    assert compiler.num_pending == 1
    slow.go.set()
    assert {(one.name, one.result) for one in wait_ready(compiler, 2)} == {("r1", "a"), ("r2", "a")}
    assert compiler.submit("r3", asked) == "a"
    assert slow.compiled == ["a"]
    totals = compiler.totals()
    assert (totals["grammar_compiled"], totals["grammar_cache_hits"]) == (1, 3)
    compiler.close()


@pytest.mark.parametrize(("text", "message"), [("bad", "no such rule"), ("worse", "the compiler failed .RuntimeError")])
def test_failures_are_remembered(text: str, message: str) -> None:
    slow = Slow()
    slow.go.set()
    compiler = GrammarCompiler(lambda: slow, 10)
    compiler.submit("r1", spec("regex", text))
    (ready,) = wait_ready(compiler, 1)
    with pytest.raises(RequestError, match=message):
        raise ready.result
    with pytest.raises(RequestError, match=message):
        compiler.submit("r2", spec("regex", text))
    assert slow.compiled == [text]
    assert compiler.totals()["grammar_failed"] == 1
    compiler.close()


def test_a_compilation_that_hangs_fails_its_request_and_no_other() -> None:
    slow, fast = Slow(), Slow()
    fast.go.set()

    class Both:
        def compile(self, asked: Any) -> Any:
            return (slow if asked.text.startswith("slow") else fast).compile(asked)

    compiler = GrammarCompiler(Both, 0.2)
    for index in range(compiling.MAX_LOST_THREADS):
        compiler.submit(f"r{index}", spec("regex", f"slow{index}"))
    compiler.submit("fine", spec("regex", "b"))
    found = {one.name: one.result for one in wait_ready(compiler, compiling.MAX_LOST_THREADS + 1)}
    assert found.pop("fine") == "b"
    assert len(found) == compiling.MAX_LOST_THREADS
    for error in found.values():
        assert "longer than 0.2 s (--grammar-compile-timeout-s)" in str(error)
    with pytest.raises(EngineBusyError, match="still being compiled after their time"):
        compiler.submit("more", spec("regex", "c"))
    with pytest.raises(RequestError, match="compiling it took longer"):
        compiler.submit("again", spec("regex", "slow0"))
    slow.go.set()
    deadline = time.monotonic() + 20
    while compiler._lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert compiler.submit("more", spec("regex", "c")) is None
    assert wait_ready(compiler, 1)[0].result == "c"
    assert compiler.submit("again", spec("regex", "slow0")) == "slow0", "what was compiled late is there"
    totals = compiler.totals()
    counts = (totals["grammar_failed"], totals["grammar_compiled"])
    assert counts == (compiling.MAX_LOST_THREADS, 2), "a grammar is counted once, as its requests were told"
    compiler.close()


def test_the_time_of_making_the_backend_counts_for_no_grammar() -> None:
    fast = Slow()
    fast.go.set()

    def make() -> Any:
        time.sleep(0.3)
        return fast

    compiler = GrammarCompiler(make, 0.1)
    compiler.submit("r1", spec("regex", "a"))
    compiler.submit("r2", spec("regex", "b"))
    assert {one.result for one in wait_ready(compiler, 2)} == {"a", "b"}
    compiler.close()


def test_a_backend_that_is_not_made_in_time_fails_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "BACKEND_TIMEOUT_S", 0.2)
    fast, made = Slow(), threading.Event()
    fast.go.set()

    def make() -> Any:
        assert made.wait(20)
        return fast

    compiler = GrammarCompiler(make, 10)
    for name in "abc":
        assert compiler.submit(name, spec("regex", name)) is None
    found = wait_ready(compiler, 3)
    assert {one.name for one in found} == set("abc")
    for one in found:
        assert isinstance(one.result, EngineBusyError)
        assert "still being made after 0.2 s" in str(one.result)
        assert "--grammar-backend" in str(one.result)
    with pytest.raises(EngineBusyError, match="still being made"):
        compiler.submit("d", spec("regex", "a"))
    assert compiler.num_pending == 0
    assert compiler.totals()["grammar_failed"] == 3
    made.set()
    deadline = time.monotonic() + 20
    while compiler._backend is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert compiler.submit("e", spec("regex", "e")) is None, "it came after all"
    assert [one.result for one in wait_ready(compiler, 1)] == ["e"]
    assert fast.compiled == ["e"], "what nobody waits for is not compiled"
    assert (compiler.totals()["grammar_failed"], compiler.totals()["grammar_compiled"]) == (3, 1)
    compiler.close()


def test_compilations_that_end_just_as_their_time_does_lose_no_thread() -> None:
    class Close:
        def compile(self, asked: Any) -> Any:
            time.sleep(0.004 + int(asked.text) % 5 / 2000)
            return asked.text

    compiler = GrammarCompiler(Close, 0.005)
    for number in range(150):
        compiler.submit("r", spec("regex", str(number)))
        (ready,) = wait_ready(compiler, 1)
        assert ready.result == str(number) or "took longer than" in str(ready.result)
        deadline = time.monotonic() + 5
        while compiler._lost and time.monotonic() < deadline:
            time.sleep(0.0005)
        assert compiler._lost == 0
    assert compiler._num_threads <= compiling.NUM_THREADS
    compiler.close()


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_CACHED", 2)
    slow = Slow()
    slow.go.set()
    compiler = GrammarCompiler(lambda: slow, 10)
    for text in ("a", "b", "c"):
        compiler.submit(text, spec("regex", text))
        wait_ready(compiler, 1)
    assert compiler.submit("again", spec("regex", "c")) == "c"
    assert compiler.submit("again", spec("regex", "a")) is None
    compiler.close()


def test_long_chains_of_rules_do_not_overflow_the_stack() -> None:
    """Such a chain ends a process whose thread has a stack of the usual size."""
    kind = GRAMMAR_BACKENDS["llguidance"]
    compiler = GrammarCompiler(lambda: kind.make(vocabulary(), GrammarOptions()), 60)
    links = {
        f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}, "required": ["x"]}
        for i in range(998)
    }
    schema = {"$ref": "#/$defs/a0", "$defs": {**links, "a998": {"type": "integer"}}}
    compiler.submit("r", spec("json_schema", schema))
    (ready,) = wait_ready(compiler, 1)
    assert not isinstance(ready.result, Exception)
    assert allowed(ready.result.matcher()) & set(WORDS_TOKENIZER.encode("{"))
    compiler.close()


def test_many_masks_are_those_of_each_alone(backend: Any) -> None:
    """Filled together where the backend can, and beside rows that are forced, free or have no grammar."""
    patterns = ["[0-9]+z", "hello the [0-9]+z", "ab+", "[a-z ]{4,}", "(yes|no)"]
    follows = [session(backend, pattern) for pattern in patterns]
    thinking = session(backend, "ab+", starts_after=WORDS_TOKENIZER.encode("tion"))
    rows: list[GrammarSession | None] = [follows[0], None, *follows[1:], thinking]
    buffers = MaskBuffers(16, 32 * len(FREE.row))
    for _ in range(3):
        masks = buffers.fill(rows).copy()
        for row, mask in zip(rows, masks, strict=True):
            alone = np.full_like(mask, 0xFFFFFFFF)
            if row is not None:
                row.fill(alone)
            assert (mask == alone).all()
        for one in follows:
            if not one.complete:
                assert one.accept(min(allowed(one)))


def test_one_that_is_slow_among_many_is_found(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [session(backend, "[0-9]+z") for _ in range(3)]
    if rows[0].matcher is None or not hasattr(rows[0].matcher, "fill_many"):
        pytest.skip("this backend fills masks one by one")
    monkeypatch.setattr(sessions, "MAX_STEP_S", -1.0)
    buffers = MaskBuffers(4, 32 * len(FREE.row))
    assert buffers.fill(rows).any()
    assert all(row.matcher is None for row in rows), "the next masks are timed one by one"
    assert not buffers.fill(rows)[:3].any()
    assert all("took longer" in (row.error or "") for row in rows)


def test_a_wrong_row_among_many_allows_nothing(backend: Any) -> None:
    good, bad, other = (session(backend, "[0-9]+z") for _ in range(3))
    assert not bad.accept(WORDS_TOKENIZER.encode("x")[0])
    masks = MaskBuffers(4, 32 * len(FREE.row)).fill([good, bad, other])
    assert masks[0].any()
    assert not masks[1].any()
    assert (masks[2] == masks[0]).all()
