"""Every call that the simulator has names the page it was modelled from, and the limits of it that are held."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "simulators" / "torch_npu"
PLATFORM = Path(__file__).parents[3] / "platforms" / "npu" / "cardan_npu"
NO_CALLS = {"NpuTensor", "__version__", "npu"}


def messages() -> str:
    """All texts that stand in the sources but for the citations themselves."""
    files = [file for file in FOLDER.glob("*.py") if file.name != "_citations.py"]
    texts = [
        part.value
        for file in files
        for part in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    return "\n".join(texts)


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


def test_pages_are_named_and_the_limits_stand_in_messages(cited):
    said = messages()
    for kind in cited.values():
        for name, citation in kind.items():
            assert re.match(
                r"(op-plugin, docs/context: \S+\.md|Ascend Extension for PyTorch 7\.3\.0, \w+)", citation.page
            )
            for limit in citation.limits:
                assert limit in said, f"{name}: {limit}"


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
