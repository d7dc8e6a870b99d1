"""docs/ says what the code does: the flags are generated, and every route is described."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from starlette.routing import Route

from cardan.cli.app import COMMANDS
from cardan.config import EngineConfig
from cardan.server.app import create_app

ROOT = Path(__file__).parents[2]


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_flags_page_is_what_the_code_gives() -> None:
    module = generator()
    assert module.FLAGS.read_text() == module.render(), "docs/flags.md is old. Run `make docs`."


def test_every_route_is_described_with_its_methods() -> None:
    engine: Any = SimpleNamespace(info=SimpleNamespace(model_name="m"))
    app = create_app(engine, EngineConfig())
    served = {
        (route.path.replace(":path", ""), method)
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    described = set()
    for row in re.findall(r"^\| (`/.*?) \| ([A-Z, ]+) \|", (ROOT / "docs" / "http-api.md").read_text(), re.MULTILINE):
        for path in re.findall(r"`([^`]+)`", row[0]):
            described |= {(path, method) for method in row[1].split(", ")}
    assert described == served


def words_after(program: str, page: str) -> set[str]:
    """What follows a program's name at the start of a line or of a code span."""
    return set(re.findall(rf"(?:`|^)\s*{program} ([a-z-]+)\b", (ROOT / page).read_text(), re.MULTILINE))


def test_the_pages_name_only_commands_and_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", ".ci/run", "docs/plugins.md"):
        assert words_after("cardan", page) <= set(COMMANDS), page
        assert words_after("make", page) <= targets, page
    assert {"serve", "plan", "chat"} <= words_after("cardan", "README.md")
    assert {"demo", "test", "check"} <= words_after("make", "README.md")


def test_the_links_between_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
