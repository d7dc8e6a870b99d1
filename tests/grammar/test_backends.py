"""Kinds of grammars, masks, forced tokens and what a matcher can take back, on every backend that is installed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from grammar_words import EOS, WORDS_TOKENIZER, allowed, spec, takes, vocabulary

from cardan.errors import ConfigError, RequestError
from cardan.grammar import GRAMMAR_BACKENDS, GrammarOptions, GrammarVocabulary, check_grammar, choose_backend
from cardan.grammar.llguidance_backend import unanchored
from cardan.grammar_spec import GrammarSpec

TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=x>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}
GBNF = 'root ::= "a" [0-9]+ ("b" | "c")*'


@pytest.mark.parametrize(
    ("kind", "value", "good", "bad"),
    [
        ("regex", "(yes|no), [0-9]{3}", ("yes, 123", "no, 000"), ("yes, 12", "maybe", "yes, 1234")),
        ("choice", ["red", 'dark "green" é'], ("red", 'dark "green" é'), ("dark", "blue", "redred")),
        ("ebnf", GBNF, ("a1", "a12bcb"), ("a", "ab", "b1")),
        ("structural_tag", TAG, ("hello", "hello <f=x>12</f>\n bye", "<f=x>1</f>"), ("a <f=y>", "<f=x>no</f>")),
        ("json_schema", True, ("{}", "1", '"x"'), ("x", "[1")),
    ],
)
def test_each_kind_allows_what_it_says_and_nothing_else(
    backend: Any, kind: str, value: Any, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    compiled = backend.compile(spec(kind, value))
    for text in good:
        assert takes(compiled.matcher(), text), text
    for text in bad:
        assert not takes(compiled.matcher(), text), text


def test_lark_rules_are_taken_by_llguidance_only(backend: Any, backend_name: str) -> None:
    lark = spec("ebnf", 'start: "a" start "b" | "c"')
    if backend_name == "llguidance":
        assert takes(backend.compile(lark).matcher(), "aacbb")
        return
    with pytest.raises(RequestError, match="Lark rules need the backend llguidance"):
        backend.compile(lark)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("regex", "(a"), ("ebnf", "root ::= foo"), ("json_schema", {"type": "integer", "minimum": "x"})],
)
def test_what_is_wrong_is_refused(backend: Any, kind: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"The grammar \({kind}\) is refused: ") as caught:
        backend.compile(spec(kind, value))
    assert caught.value.param == kind


def test_an_end_is_allowed_only_where_the_output_matches(backend: Any) -> None:
    matcher = backend.compile(spec("regex", "ab+")).matcher()
    assert EOS not in allowed(matcher)
    for token in WORDS_TOKENIZER.encode("ab"):
        assert matcher.accept(token)
    assert EOS in allowed(matcher)
    assert not matcher.complete


def test_padding_and_special_tokens_are_never_allowed(backend: Any) -> None:
    matcher = backend.compile(spec("json_schema", {})).matcher()
    assert max(allowed(matcher)) < vocabulary().size
    assert 0 not in allowed(matcher)
    text = backend.compile(spec("regex", "(.|\n)*")).matcher()
    assert max(allowed(text)) < vocabulary().size
    assert 0 not in allowed(text)


def test_a_refused_token_changes_nothing_and_taken_ones_can_be_taken_back(backend: Any) -> None:
    matcher = backend.compile(spec("regex", "a[0-9]{4}z")).matcher()
    first = allowed(matcher)
    assert not matcher.accept(WORDS_TOKENIZER.encode("b")[0])
    assert allowed(matcher) == first
    ids = WORDS_TOKENIZER.encode("a12")
    seen = []
    for token in ids:
        seen.append(allowed(matcher))
        assert matcher.accept(token)
    matcher.rollback(len(ids) - 1)
    assert allowed(matcher) == seen[1]
    matcher.rollback(1)
    assert allowed(matcher) == first


def test_matchers_of_one_grammar_do_not_know_each_other(backend: Any) -> None:
    compiled = backend.compile(spec("regex", "a[0-9]b"))
    one, other = compiled.matcher(), compiled.matcher()
    one.accept(WORDS_TOKENIZER.encode("a")[0])
    assert allowed(one) != allowed(other)


def test_forced_tokens_are_what_must_come(backend: Any) -> None:
    compiled = backend.compile(spec("regex", "hello the [0-9] abc tion end"))
    matcher = compiled.matcher()
    text = ""
    forced = matcher.forced()
    assert forced
    for token in forced:
        assert token in allowed(matcher)
        assert matcher.accept(token)
        text += WORDS_TOKENIZER.decode([token])
    assert "hello the ".startswith(text)


def test_a_complete_output_is_noticed(backend: Any) -> None:
    matcher = backend.compile(spec("regex", "abc")).matcher()
    assert not matcher.complete
    for token in WORDS_TOKENIZER.encode("abc"):
        assert matcher.accept(token)
    assert matcher.complete


def test_white_space_can_be_forbidden(backend_name: str) -> None:
    made = GRAMMAR_BACKENDS[backend_name].make(vocabulary(), GrammarOptions(any_whitespace=False))
    compiled = made.compile(spec("json_schema", {"type": "array", "items": {"type": "integer"}}))
    assert not takes(compiled.matcher(), "[ 1]")


def test_thousands_of_choices_can_be_told_apart() -> None:
    backend = GRAMMAR_BACKENDS["llguidance"].make(vocabulary(), GrammarOptions())
    choices = [f"c{number}" for number in range(10_000)]
    for kind, value, text in (("choice", choices, "c7777"), ("json_schema", {"enum": choices}, '"c7777"')):
        matcher = backend.compile(spec(kind, value)).matcher()
        for token in WORDS_TOKENIZER.encode(text):
            assert token in allowed(matcher)
            assert matcher.accept(token), matcher.error
        assert EOS in allowed(matcher)


def test_a_grammar_that_nothing_matches_is_refused() -> None:
    made = GRAMMAR_BACKENDS["llguidance"].make(vocabulary(), GrammarOptions())
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    with pytest.raises(RequestError, match="no output can match it"):
        made.compile(spec("json_schema", loop))


def test_a_grammar_that_is_too_complex_says_what_a_user_can_do() -> None:
    made = GRAMMAR_BACKENDS["llguidance"].make(vocabulary(), GrammarOptions())
    with pytest.raises(RequestError, match="too complex to prepare; write it with fewer repetitions"):
        made.compile(spec("regex", ".*" * 500))


@pytest.mark.parametrize(("pattern", "bare"), [("^a$", "a"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), ("a", "a")])
def test_anchors_around_a_pattern_say_nothing_more(pattern: str, bare: str) -> None:
    assert unanchored(pattern) == bare


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("regex", "", "is empty"),
        ("regex", "a" * 300_000, "has 300000 characters, at most 262144"),
        ("regex", "(" * 100 + ")" * 100, "nested deeper than 64"),
        ("regex", "(a{1000}){1000}", "repeats more than 10000 times"),
        ("regex", "a\ud800", "surrogate"),
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", "3", "must be a JSON schema"),
        ("json_schema", "false", "no output can match"),
        ("json_schema", '{"items":' * 200 + "{}" + "}" * 200, "nested deeper than 64"),
        ("json_schema", '{"items":' * 100_000 + "{}" + "}" * 100_000, "at most 262144|nested deeper"),
        ("json_schema", {"properties": {f"k{i}": {} for i in range(1001)}}, "1001 entries, at most 1000"),
        ("json_schema", {"enum": list(range(10_001))}, "10001 entries, at most 10000"),
        ("json_schema", {"type": "string", "pattern": "(a{1000}){1000}"}, "repeats more than"),
        ("ebnf", "\n".join(f"r{i}: r{i + 1}" for i in range(1001)), "1001 rules, at most 1000"),
        ("choice", [], "at least one text"),
        ("choice", ["a", 1], "at least one text"),
        ("choice", ["a"] * 10_001, "10001 entries"),
        ("structural_tag", "[]", "must be an object"),
        ("structural_tag", {"structures": []}, "expected {'structures'"),
        ("structural_tag", {"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]}, "none of the triggers"),
        ("structural_tag", {"structures": [3], "triggers": ["<b"]}, "expected {'structures'"),
    ],
)
def test_what_could_crash_or_stall_a_compiler_is_refused_before(kind: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_grammar(spec(kind, value), "llguidance")


def test_without_a_backend_grammars_are_refused() -> None:
    with pytest.raises(RequestError, match="no grammar backend"):
        check_grammar(spec("regex", "a"), "none")


def test_the_backend_is_chosen_by_name_or_by_what_is_installed() -> None:
    assert choose_backend("auto") == ("llguidance", "the first that is installed")
    assert choose_backend("none") == ("none", "--grammar-backend")
    assert choose_backend("auto", {})[0] == "none"
    with pytest.raises(ConfigError, match="must be one of auto, llguidance, xgrammar, none, got 'outlines'"):
        choose_backend("outlines")


def test_a_backend_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the module 'xgrammar'.*Run: pip install 'cardan\[xgrammar\]'"):
        choose_backend("xgrammar")
    assert choose_backend("auto")[0] == "none"


MARK = "<|call|>"


def with_mark() -> GrammarVocabulary:
    """A vocabulary whose last token is special."""
    plain = vocabulary()
    return dataclasses.replace(
        plain, tokens=[*plain.tokens, MARK.encode()], special_ids=plain.special_ids | {plain.size}
    )


def tag(trigger: str, begin: str) -> GrammarSpec:
    """A structural tag of one kind of span."""
    structures = [{"begin": begin, "schema": {"type": "integer"}, "end": "."}]
    return spec("structural_tag", {"structures": structures, "triggers": [trigger]})


@pytest.mark.parametrize("trigger", [MARK, f"{MARK}f", f"{MARK}f="])
def test_triggers_may_begin_with_special_tokens(trigger: str) -> None:
    words = with_mark()
    compiled = GRAMMAR_BACKENDS["llguidance"].make(words, GrammarOptions()).compile(tag(trigger, f"{MARK}f="))

    def accepts(before: str, behind: str) -> bool:
        matcher = compiled.matcher()
        ids = [*WORDS_TOKENIZER.encode(before), words.size - 1, *WORDS_TOKENIZER.encode(behind)]
        return all(matcher.accept(token) for token in ids)

    assert accepts("f=x ", "f=12. And so on.")
    assert not accepts("", "f=x")
    assert not accepts("", "g=1")


def test_triggers_that_have_special_tokens_behind_text_are_refused() -> None:
    made = GRAMMAR_BACKENDS["llguidance"].make(with_mark(), GrammarOptions())
    with pytest.raises(RequestError, match=r"trigger '<f<\|call\|>' has the special token '<\|call\|>' behind text"):
        made.compile(tag(f"<f{MARK}", f"<f{MARK}="))
