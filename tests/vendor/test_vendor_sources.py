"""The vendor examples use nothing but the documented API, compute everything themselves, and stay small."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import cardan.errors
import cardan.ops
import cardan.platform
import cardan.types
from cardan.ops import definitions, philox

EXAMPLES = Path(__file__).parents[2] / "examples"
VENDORS = {"acme_cardan": EXAMPLES / "vendor_platform", "beacon_cardan": EXAMPLES / "vendor_device"}
MOST_LINES = 350
API = {
    "cardan.platform": set(cardan.platform.__all__),
    "cardan.ops": {"Ops"},
    "cardan.types": {name for name in vars(cardan.types) if not name.startswith("_")},
    "cardan.errors": {name for name in vars(cardan.errors) if not name.startswith("_")},
}
"""What a plugin may import; of ``cardan.ops`` the table alone, since the rest are references and their tests."""


def sources(vendor: str) -> list[Path]:
    found = sorted((VENDORS[vendor] / vendor).glob("**/*.py"))
    assert found
    return found


def cardan_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Module and name of everything of Cardan's that a source uses."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "cardan":
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                if module in API:
                    aliases[alias.asname or alias.name] = module
                else:
                    yield node.module or "", alias.name
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "cardan")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield aliases[node.value.id], node.attr


@pytest.mark.parametrize("vendor", VENDORS)
def test_only_the_documented_api_is_used(vendor: str) -> None:
    used = {pair for path in sources(vendor) for pair in cardan_names(ast.parse(path.read_text()))}
    assert used
    assert {(module, name) for module, name in used if name not in API.get(module, set())} == set()


def test_the_check_sees_what_is_not_in_the_api() -> None:
    tree = ast.parse(
        "from cardan.ops import philox\nfrom cardan import platform as seam\nseam.Nothing\nimport cardan.runner"
    )
    assert set(cardan_names(tree)) == {("cardan.ops", "philox"), ("cardan.platform", "Nothing"), ("cardan.runner", "")}


def test_the_platform_is_small_enough_to_read_at_once() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in sources("acme_cardan")}
    assert sum(lines.values()) <= MOST_LINES, lines
    smaller = sum(len(path.read_text().splitlines()) for path in sources("beacon_cardan"))
    assert smaller < sum(lines.values())


def test_no_reference_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reference raises; the vendor's operations do not notice."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a reference was called")

    monkeypatch.syspath_prepend(str(VENDORS["acme_cardan"]))
    from acme_cardan.ops import AcmeOps

    for module in (definitions, philox):
        for name, value in vars(module).copy().items():
            if inspect.isfunction(value):
                monkeypatch.setattr(module, name, refuse)
    for name, value in vars(cardan.ops.ReferenceOps).copy().items():
        if inspect.isfunction(value) and name != "__init__":
            monkeypatch.setattr(cardan.ops.ReferenceOps, name, refuse)
    with pytest.raises(AssertionError):
        philox.gumbel(np.zeros(1, np.uint64), np.zeros(1, np.int32), 4)
    ops, x = AcmeOps(), np.ones((3, 8), np.float32)
    ones = np.ones(8, np.float32)
    positions = np.zeros(3, np.int32)
    results = [
        ops.rms_norm(x, ones, 1e-6),
        ops.layer_norm(x, ones, None, 1e-6),
        ops.silu(x),
        ops.gelu(x, False),
        ops.log_softmax(x),
        ops.topk(x, 3)[0],
        ops.cumsum(x),
        ops.rope(x.reshape(3, 1, 8), positions, np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32), False),
        ops.gumbel(np.zeros(3, np.uint64), positions, 8),
        ops.silu_mul(x, 4),
        *ops.add_rms_norm(x, x, ones, 1e-6),
    ]
    assert all(np.isfinite(result).all() for result in results)
    sys.modules.pop("acme_cardan", None)
