"""Every keyword of JSON Schema is enforced by the masks, or refused by name: judged by jsonschema, never by us."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from grammar_words import spec, takes
from keyword_cases import CASES, Case

from cardan.errors import RequestError
from cardan.grammar import GRAMMAR_BACKENDS, check_grammar, unenforced_names
from cardan.grammar.keywords import ANNOTATIONS

OLD = {"additionalItems", "dependencies"}
"""Keywords of draft 7."""


NARROWER = {("xgrammar", "pattern/unanchored")}
"""Where a backend takes fewer outputs than conform, as the notes of its table say."""


def judge(case: Case) -> Any:
    default = jsonschema.Draft7Validator if case.name in OLD else jsonschema.Draft202012Validator
    kind = jsonschema.validators.validator_for(case.schema, default=default)
    kind.check_schema(case.schema)
    return kind(case.schema, format_checker=kind.FORMAT_CHECKER)


def spellings(instance: Any) -> list[str]:
    return [json.dumps(instance, ensure_ascii=False, separators=pair) for pair in ((", ", ": "), (",", ":"))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.keyword)
def test_the_judge_agrees_with_the_cases(case: Case) -> None:
    validator = judge(case)
    assert [one for one in case.good if not validator.is_valid(one)] == []
    assert [one for one in case.bad if validator.is_valid(one)] == []


def test_there_are_many_keywords() -> None:
    assert len({case.name for case in CASES}) > 40


def compile_or_refusal(backend: Any, name: str, asked: Any) -> tuple[Any, str | None]:
    try:
        check_grammar(asked, name)
        return backend.compile(asked), None
    except RequestError as error:
        return None, str(error)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.keyword)
def test_a_keyword_holds_or_is_refused_by_name(case: Case, backend: Any, backend_name: str) -> None:
    asked = spec("json_schema", case.schema)
    table = GRAMMAR_BACKENDS[backend_name].keywords
    compiled, refusal = compile_or_refusal(backend, backend_name, asked)
    if refusal is not None:
        assert case.name in refusal
        assert case.name not in table.enforced or case.name in table.notes, "the table says that it is enforced"
        return
    assert case.name in table.enforced
    for instance in case.bad:
        for text in spellings(instance):
            assert not takes(compiled.matcher(), text), f"{text} is possible"
    for instance in () if (backend_name, case.keyword) in NARROWER else case.good:
        assert any(takes(compiled.matcher(), text) for text in spellings(instance)), f"{instance} is impossible"


@pytest.mark.parametrize("name", GRAMMAR_BACKENDS)
def test_every_keyword_of_a_table_has_a_case(name: str) -> None:
    table = GRAMMAR_BACKENDS[name].keywords
    tried = {case.name for case in CASES}
    assert table.enforced - tried == set()
    assert {f"format/{one}" for one in table.formats} <= {case.keyword for case in CASES}
    assert set(table.notes) <= table.enforced


@pytest.mark.parametrize("keyword", ["uniqueItems", "not", "if", "minimun", "x-guidance", "nullable"])
def test_what_is_not_enforced_is_refused_with_its_place(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {"anyOf": [{keyword: True}]}}}
    with pytest.raises(RequestError, match=rf"llguidance: {keyword} \(at /properties/a/anyOf/0/{keyword}\)") as caught:
        check_grammar(spec("json_schema", schema), "llguidance")
    assert "Take them out" in str(caught.value)


def test_a_format_that_is_not_enforced_is_named() -> None:
    with pytest.raises(RequestError, match="format: iri"):
        check_grammar(spec("json_schema", {"type": "string", "format": "iri"}), "llguidance")


def test_descriptions_are_taken() -> None:
    schema = {name: "x" for name in ANNOTATIONS if name not in ("examples", "$schema")} | {"x-order": 1, "type": "null"}
    check_grammar(spec("json_schema", schema), "llguidance")
    check_grammar(spec("json_schema", {"properties": {"not": {"type": "null"}}, "type": "object"}), "llguidance")
    check_grammar(spec("json_schema", {"const": {"not": 1}, "enum": [{"if": 2}]}), "llguidance")


def test_who_allows_it_gets_the_rest_enforced_and_the_names() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    asked = spec("json_schema", schema, allow_unenforced=True)
    check_grammar(asked, "llguidance")
    assert unenforced_names(asked, "llguidance") == ("uniqueItems",)
    assert unenforced_names(spec("json_schema", schema), "llguidance") == ()


def test_allowed_keywords_are_dropped_and_no_others(backend: Any, backend_name: str) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    compiled = backend.compile(spec("json_schema", schema, allow_unenforced=True))
    assert takes(compiled.matcher(), "[1,1]")
    assert not takes(compiled.matcher(), '["a"]')


def test_the_schemas_of_structural_tags_are_held_to_the_same() -> None:
    tag = {"structures": [{"begin": "<f>", "schema": {"not": {}}, "end": "</f>"}], "triggers": ["<f"]}
    with pytest.raises(RequestError, match=r"not \(at /not\)"):
        check_grammar(spec("structural_tag", tag), "llguidance")
