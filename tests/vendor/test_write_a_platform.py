"""docs/write-a-platform.md and docs/conformance.md say what is there: names, parts, options, sizes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import cardan.platform
from cardan.platform import OpsDevice
from cardan.testing.conformance import PARTS

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "write-a-platform.md").read_text()
SUITE = (ROOT / "docs" / "conformance.md").read_text()
DRIFT = 0.2
"""Share by which a package may have grown since `make docs` was run."""


def sizes() -> Any:
    spec = importlib.util.spec_from_file_location("platform_sizes", ROOT / "docs" / "platform_sizes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_described() -> None:
    rows = "\n".join(line for line in GUIDE.splitlines() if line.startswith("| `"))
    described = set(re.findall(r"`(\w+)`", rows))
    assert described == set(cardan.platform.__all__)


def test_every_method_that_is_named_exists() -> None:
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", GUIDE)
    assert len(named) > 20
    for owner, name in named:
        assert hasattr(getattr(cardan.platform, owner), name), f"{owner}.{name}"


def test_everything_that_a_level_2_device_must_supply_is_named() -> None:
    for name in OpsDevice.__abstractmethods__ - {"info", "close"}:
        assert f"`OpsDevice.{name}`" in GUIDE, name


def test_the_parts_are_those_of_the_suite() -> None:
    assert re.findall(r"^\| `(\w+)` \|", SUITE, re.MULTILINE) == list(PARTS)
    for page in (GUIDE, SUITE):
        assert {text.partition("/")[0] for text in re.findall(r"--(?:conformance-)?only (\S+)", page)} <= set(PARTS)


def test_the_sizes_are_counted_and_the_example_is_small() -> None:
    module = sizes()
    table = dict(re.findall(r"^\| `(\S+)` \| (\d+) \|", module.PAGE.read_text(), re.MULTILINE))
    counted = {str(package.relative_to(ROOT)): module.count(package)[0] for package in module.packages()}
    assert set(table) == set(counted), "run `make docs`"
    assert counted["examples/vendor_platform/acme_cardan"] <= 350
    for package, lines in counted.items():
        assert int(table[package]) == pytest.approx(lines, rel=DRIFT), f"{package}: run `make docs`"


def test_blank_lines_comments_and_docstrings_are_no_code() -> None:
    text = '"""Doc."""\n\n# said\nx = (\n    1\n)\n\n\ndef f():\n    """Doc\n\n    more."""\n    return x\n'
    assert sizes()._code_lines(text) == {4, 5, 6, 9, 13}
