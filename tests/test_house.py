"""Rules of the house that no linter holds: sizes, vendors' names, prints, and what importing may load."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_LINES = 500
MAX_FUNCTION_LINES = 60
VENDORS = re.compile(r"(?<![a-z])(cuda|rocm|hip|mlx|npu|xeon|amx)(?![a-z])", re.IGNORECASE)
FORBIDDEN_IMPORTS = {"torch", "mlx", "triton", "transformers"}
FOLDERS = ("runtime", "platforms", "kernels", "tests", "examples", "benchmarks", "docs")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


RUNTIME = python_files("runtime")
PRODUCT = python_files("runtime", "platforms", "kernels", "examples", "benchmarks", "docs")


def test_there_is_something_to_check() -> None:
    assert len(RUNTIME) > 20


def test_a_file_fits_in_a_head() -> None:
    counts = {name_of(path): len(path.read_text().splitlines()) for path in python_files(*FOLDERS)}
    long = {name: count for name, count in counts.items() if count > MAX_LINES}
    assert not long, f"These files have more than {MAX_LINES} lines. Split them."


def test_a_file_of_kernels_fits_in_a_head_too() -> None:
    sources = [path for path in (ROOT / "kernels" / "native" / "src").rglob("*") if path.suffix in (".cpp", ".h")]
    assert len(sources) > 20
    counts = {name_of(path): len(path.read_text().splitlines()) for path in sources}
    long = {name: count for name, count in counts.items() if count > MAX_LINES}
    assert not long, f"These files have more than {MAX_LINES} lines. Split them."


def long_functions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > MAX_FUNCTION_LINES:
                yield f"{node.name} in line {node.lineno} has {count} lines"


def test_a_function_fits_on_a_screen() -> None:
    found = {name_of(path): list(long_functions(ast.parse(path.read_text()))) for path in PRODUCT}
    long = {name: functions for name, functions in found.items() if functions}
    assert not long, f"These functions have more than {MAX_FUNCTION_LINES} lines. Split them."


def docstring_lines(tree: ast.AST) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def vendor_names(source: str) -> list[str]:
    """Places outside comments and docstrings where a vendor is named."""
    if not VENDORS.search(source):
        return []
    excused = docstring_lines(ast.parse(source))
    return [
        f"line {token.start[0]}: {token.string[:60]}"
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type != tokenize.COMMENT and token.start[0] not in excused and VENDORS.search(token.string)
    ]


def test_the_neutral_runtime_names_no_vendor() -> None:
    found = {name_of(path): vendor_names(path.read_text()) for path in RUNTIME}
    named = {name: places for name, places in found.items() if places}
    assert not named, "Vendors' names belong into platforms/."


def test_the_vendor_check_sees_code_and_strings_and_excuses_prose() -> None:
    assert vendor_names('x = "npu"\n') == ['line 1: "npu"']
    assert vendor_names("if is_cuda:\n    pass\n") == ["line 1: is_cuda"]
    assert vendor_names('"""Runs on an NPU."""\nx = 1  # not on cuda\n') == []
    assert vendor_names("input_ids = ship + chip\n") == []


def test_only_the_command_line_prints() -> None:
    prints = [
        f"{name_of(path)}:{node.lineno}"
        for path in RUNTIME
        if "cli" not in path.relative_to(ROOT).parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not prints, "These print. Return it, or log it."


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_the_runtime_imports_no_array_library_and_no_platform() -> None:
    found = [
        f"{name_of(path)} imports {name}"
        for path in RUNTIME
        for name in imported_names(ast.parse(path.read_text()))
        if name.partition(".")[0] in FORBIDDEN_IMPORTS or name.startswith("cardan_")
    ]
    assert not found


def test_importing_the_engine_loads_no_array_library() -> None:
    program = (
        "import cardan, cardan.scheduler, cardan.cache, cardan.server.app, cardan.engine.api, cardan.cli.app, sys; "
        "loaded = {'torch', 'mlx', 'triton', 'transformers'} & set(sys.modules); assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_module_says_what_it_does() -> None:
    silent = [name_of(path) for path in PRODUCT if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent, "These modules have no docstring."
