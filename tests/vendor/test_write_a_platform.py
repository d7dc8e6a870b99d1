"""docs/write-a-platform.md and docs/conformance.md say what is there: names, parts, options, sizes."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cardan.platform
import cardan_torch
from cardan.platform import (
    AttentionBackend,
    Capabilities,
    Capability,
    Device,
    DeviceInfo,
    Feature,
    GraphRunner,
    KVPool,
    LinearMethod,
    LoadedModel,
    OpsDevice,
    OpsKVPool,
    Platform,
    Runner,
    Step,
    Support,
)
from cardan.testing.conformance import PARTS, Status, Subject, collect, run_check

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


INTERFACES = [
    value
    for name in cardan.platform.__all__
    if inspect.isclass(value := getattr(cardan.platform, name)) and getattr(value, "__abstractmethods__", None)
]


def test_the_interfaces_of_both_levels_are_looked_at() -> None:
    assert {Platform, OpsDevice, LinearMethod, OpsKVPool, AttentionBackend, GraphRunner} <= set(INTERFACES)
    assert {Device, LoadedModel, KVPool, Runner, Step} <= set(INTERFACES)


@pytest.mark.parametrize("interface", INTERFACES, ids=lambda interface: interface.__name__)
def test_everything_that_must_be_supplied_is_named(interface: Any) -> None:
    for name in interface.__abstractmethods__:
        assert f"`{interface.__name__}.{name}`" in GUIDE, name


def optional_names(interface: type) -> set[str]:
    """What an interface offers with a default."""
    public = {name for name in vars(interface) if not name.startswith("_")} | set(
        vars(interface).get("__annotations__", ())
    )
    return public - interface.__abstractmethods__ - {"name"}


@pytest.mark.parametrize("interface", [Platform, OpsDevice, LinearMethod, Device, Step], ids=lambda it: it.__name__)
def test_what_may_be_supplied_is_named_too(interface: Any) -> None:
    assert optional_names(interface)
    for name in optional_names(interface):
        assert f"`{interface.__name__}.{name}`" in GUIDE, name


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example, from its sources."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "vendor_platform"))
    import acme_cardan

    yield acme_cardan
    for name in [name for name in sys.modules if name.startswith("acme_cardan")]:
        sys.modules.pop(name)


def test_every_choice_of_checks_that_the_pages_make_is_one(acme: Any) -> None:
    subject = Subject(acme.platform, quick=True)
    chosen = {text for page in (GUIDE, SUITE) for text in re.findall(r"--(?:conformance-)?only (\S+)", page)}
    assert {"capabilities", "attention/acme/decode-grouped"} <= chosen
    for text in chosen:
        assert collect(subject, (text,)), text


def test_the_checks_that_a_step_turns_green_exist(acme: Any) -> None:
    names = {check.id for check in collect(Subject(acme.platform, quick=True))}
    said = {
        text
        for line in re.findall(r"^Green: (.*)", GUIDE, re.MULTILINE)
        for text in re.findall(r"`([^`]+/[^`]*)`", line)
    }
    assert len(said) >= 5
    for text in said:
        pattern = re.compile(re.escape(text).replace("…", ".*"))
        assert any(pattern.fullmatch(name) for name in names), text


def test_a_platform_without_a_device_passes_what_the_morning_promises(acme: Any) -> None:
    class Morning(acme.AcmePlatform):
        def capabilities(self, device: DeviceInfo) -> Capabilities:
            features = {str(feature): Capability(Support.UNSUPPORTED, "not written yet") for feature in Feature}
            claims = ("dtype:float32", "kv_dtype:float32", "attention:acme")
            return Capabilities(features | {claim: Capability(Support.NATIVE, "to come") for claim in claims})

        def open(self, device: DeviceInfo, options: Any) -> OpsDevice:
            raise RuntimeError("there is no device yet")

    with Subject(Morning(), quick=True) as subject:
        ends = {check.name: run_check(subject, check).status for check in collect(subject, ("capabilities",))}
    waiting = {name for name in ends if name.endswith("-has-an-implementation")}
    assert {status for name, status in ends.items() if name not in waiting} == {Status.PASSED}
    assert {ends[name] for name in waiting} == {Status.FAILED}
    for said in ("flag-", "request-field-"):
        assert any(name.startswith(said) for name in ends)


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


def test_what_devices_of_torch_share_is_exported_and_described() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    section = GUIDE.partition("## Devices of torch")[2].partition("## Level 1")[0]
    named = set(re.findall(r"`(\w+)`", section)) - {"cardan_torch", "OpsDevice", "Communicator"}
    assert named == set(cardan_torch.__all__)
    for name in cardan_torch.__all__:
        assert getattr(cardan_torch, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = cardan_torch.Nothing


def test_naming_what_devices_of_torch_share_imports_no_torch() -> None:
    """Of what a platform needs before it is opened."""
    program = (
        "import sys; from cardan_torch import GIB, Ladder, OwnMemoryPolicy, Tier; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
