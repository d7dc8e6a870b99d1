"""Every call that the simulator has names the page it was modelled from, and the limits of it that are held."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "simulators" / "torch_npu"
PLATFORM = Path(__file__).parents[3] / "platforms" / "npu" / "cardan_npu"
NO_CALLS = {"NpuTensor", "__version__", "npu"}


REFUSALS = {"refuse": (0, 1), "require": (1, 2), "require_dtype": (2, 3)}
"""Places of the name of the call and of what is said, in the functions that refuse."""
ANY = "any operation"
ALSO = {
    "allreduce": {"HcclAllReduce"},
    "allgather": {"HcclAllGather"},
    "NPUGraph": {ANY, "synchronize", "copy_", "_to_copy"},
    "NPUGraph.update": {"NPUGraph.replay"},
}
"""Names under which calls are refused beside their own: what a graph rules out is refused by what is captured,
and an update that did not come by the replay."""

Function = ast.FunctionDef | None


class Refusals:
    """What the functions of one file say when they refuse, by the names that they refuse under."""

    def __init__(self, file: Path) -> None:
        self._tree = ast.parse(file.read_text(encoding="utf-8"))
        self._calls = list(self._calls_in(self._tree, None))

    def said(self) -> Iterator[tuple[str, str]]:
        for call, function in self._calls:
            name, what = REFUSALS.get(getattr(call.func, "id", ""), (None, None))
            if name is not None:
                parts = (part for part in ast.walk(call.args[what]) if isinstance(part, ast.Constant))
                text = "".join(str(part.value) for part in parts)
                yield from ((label, text) for label in self._labels(call.args[name], function))

    def _calls_in(self, node: ast.AST, function: Function) -> Iterator[tuple[ast.Call, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield child, function
            yield from self._calls_in(child, child if isinstance(child, ast.FunctionDef) else function)

    def _labels(self, name: ast.expr, function: Function) -> set[str]:
        """Names that an argument may have: a text, a constant, or what callers pass on."""
        if isinstance(name, ast.Constant):
            return {name.value}
        if not isinstance(name, ast.Name):
            return {ANY}
        for scope in filter(None, (function, self._tree)):
            for line in scope.body:
                if isinstance(line, ast.Assign) and getattr(line.targets[0], "id", None) == name.id:
                    return self._labels(line.value, function)
        place = [argument.arg for argument in function.args.args].index(name.id)
        callers = [(call, by) for call, by in self._calls if getattr(call.func, "id", None) == function.name]
        return set().union(*(self._labels(call.args[place], by) for call, by in callers))


@pytest.fixture(scope="module")
def said() -> dict[str, set[str]]:
    """All that is said of each call by what refuses it."""
    found: dict[str, set[str]] = {}
    for file in FOLDER.glob("*.py"):
        if file.name != "_refusal.py":
            for label, text in Refusals(file).said():
                found.setdefault(label, set()).add(text)
    return found


@pytest.fixture(scope="module")
def cited(torch_npu: Any) -> dict[str, dict[str, Any]]:
    from torch_npu import _citations

    return {name: getattr(_citations, name) for name in ("OPERATORS", "DEVICE", "COLLECTIVES")}


def test_every_function_of_the_package_is_cited(torch_npu, cited):
    assert cited["OPERATORS"].keys() == set(torch_npu.__all__) - NO_CALLS


def test_everything_of_the_device_is_cited(torch_npu, cited):
    offered = {name for name in vars(type(torch_npu.npu)) if not name.startswith("_")}
    assert {name for name in cited["DEVICE"] if "." not in name} == offered


def test_every_collective_is_cited(torch_npu, cited):
    from torch_npu._distributed import ProcessGroupHCCL

    ours = {name for name in vars(ProcessGroupHCCL) if not name.startswith("_")}
    assert cited["COLLECTIVES"].keys() == ours - {"getBackendName"}


def test_pages_are_named(cited):
    for kind in cited.values():
        for citation in kind.values():
            assert re.match(
                r"(op-plugin, docs/context: \S+\.md|Ascend Extension for PyTorch 7\.3\.0, \w+)", citation.page
            )


def test_each_limit_stands_in_one_message_of_its_own_call(cited, said):
    for kind in cited.values():
        for name, citation in kind.items():
            own = set().union(*(said.get(label, ()) for label in {name, *ALSO.get(name, ())}))
            own |= {text for label, texts in said.items() if label.startswith(f"{name}.") for text in texts}
            for limit in citation.limits:
                assert len([text for text in own if limit in text]) == 1, f"{name}: {limit}"


def test_limits_are_looked_for_in_what_refuses_only(tmp_path):
    file = tmp_path / "some.py"
    file.write_text(
        'NAME = "first"\n'
        "def first(x):\n"
        '    """Not this."""\n'
        '    require(x, NAME, f"x must be {x} or more")\n'
        '    check(x, "second")\n'
        "def check(x, function):\n"
        '    require_dtype(x, ("int8",), function, "the tensor")\n'
        '    refuse(str(x), "never")\n'
        '    note("nor this")\n'
    )
    wanted = {("first", "x must be  or more"), ("second", "the tensor"), (ANY, "never")}
    assert set(Refusals(file).said()) == wanted


def test_operators_that_compute_hold_some_limit(cited):
    held = {name for name, citation in cited["OPERATORS"].items() if citation.limits}
    assert cited["OPERATORS"].keys() - held == {"get_npu_format"}


def test_the_platform_calls_nothing_that_is_not_cited(cited):
    sources = "\n".join(file.read_text(encoding="utf-8") for file in PLATFORM.glob("*.py"))
    called = set(re.findall(r"\btorch_npu\.((?:npu|get)_\w+)\(", sources))
    assert len(called) >= 10
    assert called <= cited["OPERATORS"].keys()
    used = set(re.findall(r"\b(?:torch\.npu|NPU|npu)\.(\w+)\(", sources))
    assert len(used) >= 8
    assert used <= cited["DEVICE"].keys()
