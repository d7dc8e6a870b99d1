"""Pages say what the code does: flags are generated, routes described, and command lines are parsed as the CLI does."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from cyclopts import CycloptsError

from cardan.cli.app import COMMANDS, make_app
from cardan.server.routes import build_routes

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


def test_the_tables_of_routes_are_what_the_code_gives() -> None:
    module = generator()
    page = module.HTTP_API.read_text()
    assert module.ROUTES_BEGIN in page
    assert module.ROUTES_END in page
    assert page == module.render_http_api(page), "docs/http-api.md is old. Run `make docs`."


def test_every_route_is_described_with_its_methods() -> None:
    served = {
        (route.path.replace(":path", ""), method)
        for route in build_routes(with_metrics=True)
        for method in (route.methods or set()) - {"HEAD"}
    }
    described = set()
    for row in re.findall(r"^\| (`/.*?) \| ([A-Z, ]+) \|", (ROOT / "docs" / "http-api.md").read_text(), re.MULTILINE):
        for path in re.findall(r"`([^`]+)`", row[0]):
            described |= {(path, method) for method in row[1].split(", ")}
    assert described == served


PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    ]
)


def command_lines(text: str, program: str) -> list[str]:
    """Lines of code blocks, and code spans, that begin with a program; settings before it are left out."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = []
    for line in (*lines, *(" ".join(span.split()) for span in spans)):
        said = re.match(rf"(?:\$ )?(?:\w+=\S+ )*({program}(?: .*)?)$", line.strip())
        if said is not None:
            found.append(said[1])
    return found


LINES = [
    (path.relative_to(ROOT).as_posix(), line) for path in PAGES for line in command_lines(path.read_text(), "cardan")
]


@pytest.mark.parametrize(("page", "line"), LINES)
def test_every_command_line_of_the_pages_is_one(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    if words:
        make_app().parse_args(words, print_error=False, exit_on_error=False)


def test_the_pages_are_read() -> None:
    lines = dict.fromkeys(page for page, _ in LINES)
    assert {"README.md", "docs/write-a-platform.md", "docs/platforms/mlx.md", "docs/conformance.md"} <= set(lines)
    assert {"examples/vendor_platform/README.md", "examples/vendor_device/README.md"} <= set(lines)
    named = {line.split()[1] for _, line in LINES if " " in line}
    assert {"serve", "plan", "chat", "bench", "conform", "platforms"} <= named <= set(COMMANDS)


@pytest.mark.parametrize(
    "line",
    [
        "cardan serve smollm2-135m --platform acme",
        "cardan nothing",
        "cardan serve --modle x",
        "cardan plan --tp-size x",
    ],
)
def test_a_line_that_is_none_is_noticed(line: str) -> None:
    text = f"Say `{line}`:\n\n```sh\nA=1 {line}   # so\n```\n"
    assert command_lines(text, "cardan") == [f"{line}   # so", line]
    with pytest.raises(CycloptsError):
        test_every_command_line_of_the_pages_is_one("", line)


def test_the_pages_name_only_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {}
    for path in PAGES:
        named[path.relative_to(ROOT).as_posix()] = {
            line.split()[1] for line in command_lines(path.read_text(), "make") if " " in line
        }
    named[".ci/run"] = set(re.findall(r"^\s*make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    for page, words in named.items():
        assert {word for word in words if "=" not in word} <= targets, page
    assert {"demo", "test", "check"} <= named["README.md"]
    assert named[".ci/run"]


def test_the_options_of_the_suite_as_pytest_exist(pytestconfig: pytest.Config) -> None:
    lines = [line for path in PAGES for line in path.read_text().splitlines() if "--pyargs cardan.testing" in line]
    options = {option for line in lines for option in re.findall(r"--[a-z][a-z-]*", line)}
    assert {"--conformance-quick", "--conformance-only", "--platform"} <= options
    for option in options:
        pytestconfig.getoption(option)  # raises for one that nobody declared


def test_the_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
