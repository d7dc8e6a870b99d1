"""When an answer ends: the order of the conditions, steps of several tokens, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cardan.errors import RequestError
from cardan.text import (
    REGEX_WINDOW,
    StopChecker,
    TextStream,
    Tokenizer,
    build_stop_checker,
    load_tokenizer,
    validate_stop_regex,
)
from cardan.types import FinishKind, FinishReason, SamplingParams
from cardan.weights import TokenizerSource

EOS = 256
IM_END = 258


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose ids 0 to 255 are bytes, then ``<|endoftext|>``, ``<|im_start|>``, ``<|im_end|>``."""
    from cardan.testing.tiny_model import write_tiny_model

    return load_tokenizer(TokenizerSource(folder=write_tiny_model(tmp_path_factory.mktemp("letters"))))


def checker(tokenizer: Tokenizer, **params: Any) -> StopChecker:
    return build_stop_checker(SamplingParams(**{"max_new_tokens": 10**6, **params}), {EOS}, tokenizer)


def run(subject: StopChecker, ids: list[int], step: int = 1) -> tuple[FinishReason | None, int | None]:
    """Feed ``ids`` in steps; returns the reason and how many tokens belong to the answer."""
    output: list[int] = []
    for at in range(0, len(ids), step):
        new = ids[at : at + step]
        output += new
        reason = subject.check(output, len(new))
        if reason is not None:
            return reason, subject.num_kept
    return None, None


def stop(matched: int | str) -> FinishReason:
    return FinishReason(FinishKind.STOP, matched=matched)


def test_a_request_without_stop_texts_is_plain(letters: Tokenizer) -> None:
    subject = checker(letters, stop_token_ids=(65,), max_new_tokens=9, min_new_tokens=2)
    assert subject.plain
    assert subject.stop_ids == {65, EOS}
    assert (subject.max_new_tokens, subject.min_new_tokens, subject.ignore_eos) == (9, 2, False)
    assert not checker(letters, stop=("x",)).plain
    assert not checker(letters, stop_regex=("x",)).plain


def test_ignore_eos_leaves_the_named_tokens(letters: Tokenizer) -> None:
    subject = checker(letters, stop_token_ids=(65,), ignore_eos=True)
    assert subject.stop_ids == {65}
    assert run(subject, [EOS, 1, 65, 2]) == (stop(65), 3)


def test_a_stop_token_waits_for_min_new_tokens_before_it(letters: Tokenizer) -> None:
    for least, kept in ((0, 1), (1, 3), (2, 3), (3, 5)):
        assert run(checker(letters, min_new_tokens=least), [EOS, 1, EOS, 2, EOS]) == (stop(EOS), kept)


def test_length(letters: Tokenizer) -> None:
    subject = checker(letters, max_new_tokens=3)
    assert run(subject, [1, 2, 3]) == (FinishReason(FinishKind.LENGTH, length=3), 3)
    lowered = checker(letters, max_new_tokens=30)
    lowered.max_new_tokens = 2
    assert run(lowered, [1, 2, 3]) == (FinishReason(FinishKind.LENGTH, length=2), 2)


def test_the_order_at_one_token(letters: Tokenizer) -> None:
    c = ord("c")
    everything = {"stop": ("bc",), "stop_regex": ("[b-d]c",), "stop_token_ids": (c,), "max_new_tokens": 3}
    ids = list(b"abc")
    for expected in (stop("bc"), stop("[b-d]c"), stop(c), FinishReason(FinishKind.LENGTH, length=3)):
        assert run(checker(letters, **everything), ids) == (expected, 3)
        everything.pop(next(iter(everything)))


@pytest.mark.parametrize("step", [1, 2, 3, 5, 8])
def test_the_first_token_that_ends_it_decides_in_a_step_of_several(letters: Tokenizer, step: int) -> None:
    ids = list(b"hello EN") + list(b"D, more") + [EOS]
    assert run(checker(letters, stop=("END",)), ids, step) == (stop("END"), 9)
    assert run(checker(letters, stop_regex=(r"E\w+D",)), ids, step) == (stop(r"E\w+D"), 9)
    assert run(checker(letters, max_new_tokens=4), ids, step) == (FinishReason(FinishKind.LENGTH, length=4), 4)


def test_of_two_strings_the_one_that_ends_first_wins(letters: Tokenizer) -> None:
    assert run(checker(letters, stop=("abcd", "bc")), list(b"abcd")) == (stop("bc"), 3)
    assert run(checker(letters, stop=("c", "abc")), list(b"abcd")) == (stop("abc"), 3)


def test_strings_that_overlap_themselves(letters: Tokenizer) -> None:
    assert run(checker(letters, stop=("aab",)), list(b"aaab")) == (stop("aab"), 4)
    assert run(checker(letters, stop=("ababc",)), list(b"abababc")) == (stop("ababc"), 7)


def test_a_stop_string_of_several_bytes(letters: Tokenizer) -> None:
    ids = letters.encode("x 🎉 y")
    assert run(checker(letters, stop=("🎉",)), ids) == (stop("🎉"), 6)


@pytest.mark.parametrize("skip", [True, False])
def test_the_text_of_a_special_token_stops_at_it_either_way(letters: Tokenizer, skip: bool) -> None:
    subject = checker(letters, stop=("<|im_end|>",), skip_special_tokens=skip)
    assert run(subject, [1, 2, IM_END, 3]) == (stop("<|im_end|>"), 3)
    written_out = checker(letters, stop=("<|im_end|>",), skip_special_tokens=skip)
    assert run(written_out, list(b"a<|im_end|>b")) == (stop("<|im_end|>"), 11)


def test_special_tokens_are_part_of_the_text_only_when_they_are_shown(letters: Tokenizer) -> None:
    ids = [ord("a"), IM_END, ord("b"), 1]
    assert run(checker(letters, stop=("ab",)), ids) == (stop("ab"), 3)
    assert run(checker(letters, stop=("ab",), skip_special_tokens=False), ids) == (None, None)


def test_regex_assertions_see_what_stands_before_the_window(letters: Tokenizer) -> None:
    text = list(b"q" * 3000)
    assert run(checker(letters, stop_regex=("^q+x",)), [*b"qqx"]) == (stop("^q+x"), 3)
    assert run(checker(letters, stop_regex=("^x",)), [*text, *b"xx"]) == (None, None)
    assert run(checker(letters, stop_regex=(r"\bx",)), [*text, *b"x x"]) == (stop(r"\bx"), 3003)


def test_a_pattern_is_seen_as_far_back_as_the_window(letters: Tokenizer) -> None:
    inside = list(b"<" + b"q" * (REGEX_WINDOW - 2) + b">")
    assert run(checker(letters, stop_regex=("<.*>",)), inside) == (stop("<.*>"), REGEX_WINDOW)
    beyond = list(b"<" + b"q" * (REGEX_WINDOW - 1) + b">")
    assert run(checker(letters, stop_regex=("<.*>",)), beyond) == (None, None)


def test_the_text_searched_does_not_grow(letters: Tokenizer) -> None:
    subject = checker(letters, stop_regex=("<.*>",))
    run(subject, list(b"q" * 5000))
    assert subject._scanner is not None
    assert len(subject._scanner._tail) == REGEX_WINDOW
    short = checker(letters, stop_regex=(r"\d+",))
    run(short, list(b"q" * 5000))
    assert short._scanner is not None
    assert len(short._scanner._tail) == 1


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": ("",)}, "stop must not hold an empty string"),
        ({"stop": ("x" * 1025,)}, "An entry of stop may have at most 1024 characters, got 1025"),
        ({"stop": ("x",) * 65}, "stop may have at most 64 entries, got 65"),
        ({"stop_regex": ("x",) * 65}, "stop_regex may have at most 64 entries, got 65"),
        ({"stop_regex": ("",)}, "stop_regex must not hold an empty string"),
        ({"stop_regex": ("(a",)}, r"stop_regex '\(a' is not a valid RE2 pattern: missing \): \(a"),
        ({"stop_regex": ("(?=a)b",)}, "not a valid RE2 pattern.*no look-around"),
        ({"stop_regex": (r"(a)\1",)}, "no back-references"),
        ({"stop_regex": ("((a{100}){100}){100}",)}, "not a valid RE2 pattern"),
        ({"stop_regex": ("x*",)}, "matches the empty text"),
        ({"stop_regex": ("\ud800",)}, "half of a surrogate pair"),
    ],
)
def test_what_is_refused(letters: Tokenizer, params: dict[str, Any], message: str) -> None:
    for build in (lambda: checker(letters, **params), lambda: TextStream(SamplingParams(**params), letters)):
        with pytest.raises(RequestError, match=message) as caught:
            build()
        assert caught.value.param == next(iter(params))


def test_validate_stop_regex_says_nothing_of_a_good_pattern(capfd: pytest.CaptureFixture[str]) -> None:
    validate_stop_regex(r"\n\n|\d{3,}")
    with pytest.raises(RequestError):
        validate_stop_regex("(")
    assert capfd.readouterr() == ("", "")


def test_a_pattern_that_would_backtrack_is_quick(letters: Tokenizer) -> None:
    subject = checker(letters, stop_regex=("(a+)+b",))
    assert run(subject, list(b"a" * 2000 + b"c")) == (None, None)


# --- against a plain search of the whole text ------------------------------------------------------------

STRINGS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text("abc", max_size=40), strings=STRINGS, step=st.integers(1, 6))
def test_strings_stop_at_the_first_end_of_any(letters: Tokenizer, text: str, strings: list[str], step: int) -> None:
    ends = [text.find(string) + len(string) for string in strings if string in text]
    reason, kept = run(checker(letters, stop=tuple(strings)), list(text.encode()), step)
    assert kept == (min(ends) if ends else None)
    if kept is not None:
        assert reason is not None
        assert text[:kept].endswith(str(reason.matched))
        assert len(str(reason.matched)) == max(len(string) for string in strings if text[:kept].endswith(string))


# --- the text that streams ---------------------------------------------------------------------------------


def streamed(tokenizer: Tokenizer, params: SamplingParams, ids: list[int], cuts: list[int]) -> list[str]:
    """What a stream sends when a scheduler steps one token at a time and hands tokens on in pieces."""
    subject = build_stop_checker(params, {EOS}, tokenizer)
    reason, kept = run(subject, ids)
    ids = ids[:kept]
    stream = TextStream(params, tokenizer)
    pieces, at, turn = [], 0, 0
    while at < len(ids):
        size = min(cuts[turn % len(cuts)], len(ids) - at)
        last = at + size == len(ids)
        pieces.append(stream.push(ids[at : at + size], (reason or FinishReason(FinishKind.ABORT)) if last else None))
        at, turn = at + size, turn + 1
    return pieces


PATTERNS = st.sampled_from(["[ab]c+", "ca?b", "b{2,}", "a.*c", r"\bb", r"a\B", "^ab", "c$", "(?i)B C", "é+b"])


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    ids=st.lists(st.one_of(st.sampled_from(list("abc é".encode())), st.sampled_from([EOS, IM_END, 0xF0])), max_size=40),
    stops=st.lists(st.text("abc é", min_size=1, max_size=4), max_size=3),
    patterns=st.lists(PATTERNS, max_size=2),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_every_split_gives_the_same_text(
    letters: Tokenizer,
    ids: list[int],
    stops: list[str],
    patterns: list[str],
    cuts: list[int],
    flags: tuple[bool, bool, bool],
) -> None:
    skip, no_trim, ignore_eos = flags
    params = SamplingParams(
        stop=tuple(stops),
        stop_regex=tuple(patterns),
        skip_special_tokens=skip,
        no_stop_trim=no_trim,
        ignore_eos=ignore_eos,
        max_new_tokens=1000,
    )
    whole = "".join(streamed(letters, params, ids, [1000]))
    assert "".join(streamed(letters, params, ids, cuts)) == whole
    assert "".join(streamed(letters, params, ids, [1])) == whole

    reason, kept = run(build_stop_checker(params, {EOS}, letters), ids)
    everything = letters.decode(ids[:kept], skip_special_tokens=skip)
    assert everything.startswith(whole)
    if no_trim or reason is None:
        assert whole == everything
    elif isinstance(reason.matched, int):
        assert whole == letters.decode(ids[: kept - 1 if kept else 0], skip_special_tokens=skip)
    elif reason.matched in stops:
        assert whole == everything[: len(everything) - len(reason.matched)]
    for text in stops:
        assert no_trim or text not in whole


def test_text_that_may_begin_a_stop_string_is_held_back_and_no_more(letters: Tokenizer) -> None:
    stream = TextStream(SamplingParams(stop=("STOP",)), letters)
    assert stream.push(list(b"abc")) == "abc"
    assert stream.push(list(b"dST")) == "d"
    assert stream.push(list(b"AY")) == "STAY"
    assert stream.push(list(b"xSTO")) == "x"
    assert stream.push([], FinishReason(FinishKind.LENGTH, length=10)) == "STO"


def test_nothing_follows_a_stop(letters: Tokenizer) -> None:
    stream = TextStream(SamplingParams(stop=("STOP",)), letters)
    assert stream.push(list(b"aSTOPb")) == "a"
    assert stream.push(list(b"c")) == ""
    assert stream.push([], stop("STOP")) == ""


def test_a_pattern_without_a_width_holds_back_the_window(letters: Tokenizer) -> None:
    stream = TextStream(SamplingParams(stop_regex=("<.*>",)), letters)
    text = b"q" * (REGEX_WINDOW + 10)
    assert stream.push(list(text)) == "q" * 11
    assert stream.push(list(b"<x>"), stop("<.*>")) == "q" * (REGEX_WINDOW - 1)


def test_the_stop_token_has_no_text_unless_no_stop_trim(letters: Tokenizer) -> None:
    for params, text in (
        (SamplingParams(), "a"),
        (SamplingParams(skip_special_tokens=False), "a"),
        (SamplingParams(no_stop_trim=True), "a"),
        (SamplingParams(skip_special_tokens=False, no_stop_trim=True), "a<|endoftext|>"),
        (SamplingParams(stop_token_ids=(98,), no_stop_trim=True), "ab"),
    ):
        last = 98 if params.stop_token_ids else EOS
        assert TextStream(params, letters).push([97, last], stop(last)) == text
    assert TextStream(SamplingParams(stop_token_ids=(98,)), letters).push([97, 98], stop(98)) == "a"


def test_an_unfinished_character_goes_out_at_the_end(letters: Tokenizer) -> None:
    for params in (SamplingParams(), SamplingParams(stop=("x",))):
        stream = TextStream(params, letters)
        assert stream.push([97, 0xF0, 0x9F]) == "a"
        assert stream.push([], FinishReason(FinishKind.LENGTH, length=3)) == "\ufffd"


def test_an_answer_keeps_the_space_that_joins_it_to_its_prompt(sentencepiece_metadata: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(TokenizerSource(gguf=sentencepiece_metadata))
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert TextStream(SamplingParams(), tokenizer).push(ids) == " the fox"
    assert run(build_stop_checker(SamplingParams(stop=(" the",)), {2}, tokenizer), ids)[0] == stop(" the")
