"""The page about structured output says what the code does."""

from __future__ import annotations

import ast
import builtins
import importlib.util
from pathlib import Path

from keyword_cases import CASES

from cardan.grammar.keywords import STANDARD

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_keywords_is_the_codes() -> None:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (DOCS / "structured-output.md").read_text()
    assert page == module.render_structured_output(page), "docs/structured-output.md is old. Run `make docs`."
    assert "| `uniqueItems` | refused | refused |" in page


def test_every_keyword_of_the_table_is_tried() -> None:
    together = {"if": {"if", "then", "else"}}
    tried = {name for case in CASES for name in together.get(case.name, {case.name})}
    assert STANDARD - tried == set()


def test_the_example_makes_what_it_uses() -> None:
    (_, rest) = (DOCS / "structured-output.md").read_text().split("```python\n", 1)
    body = ast.parse(rest.split("```")[0])
    names = [node for node in ast.walk(body) if isinstance(node, ast.Name)]
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    made |= {node.name.split(".")[-1] for node in ast.walk(body) if isinstance(node, (ast.ClassDef, ast.alias))}
    assert {node.id for node in names} <= made
