"""Finding, loading and choosing platform plugins."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cardan.errors import ConfigError, PlatformApiError, PlatformLoadError, PlatformNotFoundError
from cardan.platform import (
    PLATFORM_API,
    Availability,
    Capabilities,
    Capability,
    DeviceInfo,
    OptionSpec,
    Platform,
    Support,
    discovery,
)
from cardan.platform.discovery import choose_platform, find_plugins, load_platform, platforms_claiming, survey


class FakePlatform(Platform):
    def __init__(
        self, name: str, score: int = 1, *, usable: bool = True, api: tuple[int, int] = (1, 1), reason: str = "fine"
    ) -> None:
        self.name = name
        self.api_range = api
        self._availability = Availability(score, reason, usable)

    def probe(self) -> Availability:
        return self._availability

    def devices(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo(index=0, name="fake"),)

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        return Capabilities({"weights:Q4_1": Capability(Support.NATIVE), "weights:Q6_K": Capability(Support.EMULATED)})

    def open(self, device: DeviceInfo, options: Any) -> Any:
        raise AssertionError("discovery must not open a device")


class BrokenProbe(FakePlatform):
    def probe(self) -> Availability:
        raise OSError("driver went away")


@dataclass
class FakeDist:
    name: str
    version: str


class FakeEntryPoint:
    def __init__(self, name: str, result: Any, dist: str = "fake-dist", version: str = "1.0") -> None:
        self.name = name
        self.value = f"{dist.replace('-', '_')}:platform"
        self.dist = FakeDist(dist, version)
        self.result = result
        self.loads = 0

    def load(self) -> Any:
        self.loads += 1
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def test_names_come_from_metadata_without_import() -> None:
    points = [FakeEntryPoint("b", FakePlatform("b")), FakeEntryPoint("a", ImportError("x"), "a-dist", "2.1")]
    plugins = find_plugins(points)
    assert [(p.name, p.origin) for p in plugins] == [("a", "a-dist 2.1"), ("b", "fake-dist 1.0")]
    assert [p.loads for p in points] == [0, 0]


def test_only_the_named_platform_is_imported() -> None:
    wanted, broken = FakeEntryPoint("good", FakePlatform("good")), FakeEntryPoint("bad", ImportError("no"))
    assert load_platform("good", [broken, wanted]).name == "good"
    assert (wanted.loads, broken.loads) == (1, 0)


def test_unknown_name_lists_the_installed_ones() -> None:
    with pytest.raises(PlatformNotFoundError, match=r"named 'c'\. Installed: a, b\. Pass --platform"):
        load_platform("c", [FakeEntryPoint("a", None), FakeEntryPoint("b", None)])
    with pytest.raises(PlatformNotFoundError, match="Installed: none"):
        load_platform("c", [])


@pytest.mark.parametrize("error", [ImportError("libfoo.so.3: not found"), SystemExit("bye"), RuntimeError("boom")])
@pytest.mark.parametrize("choose", [load_platform, choose_platform])
def test_a_plugin_that_fails_to_load_is_a_hard_failure_when_named(error: BaseException, choose: Any) -> None:
    points = [FakeEntryPoint("bad", error, "bad-dist", "3.2"), FakeEntryPoint("good", FakePlatform("good"))]
    with pytest.raises(PlatformLoadError) as caught:
        choose("bad", points)
    assert caught.value.__cause__ is error
    for part in ("bad-dist 3.2", type(error).__name__, str(error), "Repair or uninstall bad-dist"):
        assert part in str(caught.value)


def test_two_plugins_of_one_name_name_both_distributions() -> None:
    points = [
        FakeEntryPoint("x", FakePlatform("x"), "first-dist", "1.0"),
        FakeEntryPoint("x", FakePlatform("x"), "second-dist", "2.0"),
        FakeEntryPoint("y", FakePlatform("y")),
    ]
    with pytest.raises(PlatformLoadError, match=r"first-dist 1\.0 and second-dist 2\.0.*uninstall one"):
        load_platform("x", points)
    assert load_platform("y", points).name == "y"
    assert [s.error is None for s in survey(points)] == [False, False, True]


@pytest.mark.parametrize(
    ("api", "wanted", "advice"),
    [
        ((PLATFORM_API + 1, PLATFORM_API + 2), f"{PLATFORM_API + 1} to {PLATFORM_API + 2}", "older"),
        ((0, 0), "0", "newer"),
    ],
)
def test_another_platform_api_names_both_versions(api: tuple[int, int], wanted: str, advice: str) -> None:
    points = [FakeEntryPoint("x", FakePlatform("x", api=api), "x-dist", "9.9")]
    with pytest.raises(PlatformApiError) as caught:
        load_platform("x", points)
    message = str(caught.value)
    assert f"for PLATFORM_API {wanted}, this Cardan has {PLATFORM_API}" in message
    assert "x-dist 9.9" in message
    assert advice in message


def test_a_plugin_for_the_version_before_still_runs_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "PLATFORM_API", 5)
    monkeypatch.setattr(discovery, "OLDEST_PLATFORM_API", 4)
    points = [FakeEntryPoint("x", FakePlatform("x", api=(3, 4)), "x-dist", "9.9")]
    assert load_platform("x", points).name == "x"
    assert "was written for PLATFORM_API 4, this Cardan has 5" in caplog.text
    assert "x-dist" in caplog.text
    with pytest.raises(PlatformApiError):
        load_platform("x", [FakeEntryPoint("x", FakePlatform("x", api=(2, 3)), "x-dist", "9.9")])


@pytest.mark.parametrize(
    ("value", "got"), [(FakePlatform, "the class FakePlatform"), (3, "type int"), (None, "NoneType")]
)
def test_an_object_of_the_wrong_type_is_refused(value: Any, got: str) -> None:
    with pytest.raises(PlatformLoadError, match=f"must be an instance of cardan.platform.Platform, got .*{got}"):
        load_platform("x", [FakeEntryPoint("x", value)])


def test_a_platform_of_another_name_is_refused() -> None:
    with pytest.raises(PlatformLoadError, match="calls itself 'y', expected 'x'"):
        load_platform("x", [FakeEntryPoint("x", FakePlatform("y"))])


def test_auto_takes_the_highest_score() -> None:
    points = [FakeEntryPoint(name, FakePlatform(name, score)) for name, score in (("a", 10), ("b", 50), ("c", 0))]
    assert choose_platform("auto", points).name == "b"


def test_auto_ignores_what_cannot_run_however_it_scores() -> None:
    points = [
        FakeEntryPoint("a", FakePlatform("a", 99, usable=False)),
        FakeEntryPoint("b", FakePlatform("b", 1)),
    ]
    assert choose_platform("auto", points).name == "b"


def test_auto_refuses_a_tie_and_lists_both() -> None:
    points = [FakeEntryPoint(name, FakePlatform(name, 10)) for name in ("a", "b")]
    with pytest.raises(PlatformLoadError, match=r"'a' and 'b' both score 10.*Pass --platform"):
        choose_platform("auto", points)


def test_auto_lists_every_reason_when_none_is_usable() -> None:
    points = [
        FakeEntryPoint("a", FakePlatform("a", 0, usable=False, reason="no such device")),
        FakeEntryPoint("b", ImportError("libb missing"), "b-dist", "0.1"),
        FakeEntryPoint("c", FakePlatform("c", 0, reason="made for tests")),
        FakeEntryPoint("d", BrokenProbe("d")),
    ]
    with pytest.raises(PlatformNotFoundError) as caught:
        choose_platform("auto", points)
    message = str(caught.value)
    for part in (
        "no such device",
        "libb missing",
        "b-dist 0.1",
        "made for tests (only when named)",
        "driver went away",
    ):
        assert part in message


def test_auto_says_which_broken_plugin_it_left_out(caplog: pytest.LogCaptureFixture) -> None:
    points = [FakeEntryPoint("a", ImportError("libb missing")), FakeEntryPoint("b", FakePlatform("b", 1))]
    assert choose_platform("auto", points).name == "b"
    assert "left out of the choice" in caplog.text
    assert "libb missing" in caplog.text


def test_a_named_platform_that_cannot_run_says_why() -> None:
    points = [FakeEntryPoint("a", FakePlatform("a", 0, usable=False, reason="no such device"))]
    with pytest.raises(PlatformNotFoundError, match="'a' cannot run on this machine: no such device"):
        choose_platform("a", points)
    assert choose_platform("b", [FakeEntryPoint("b", FakePlatform("b", 0))]).name == "b"


def test_a_trial_of_a_platform_that_cannot_run_says_what_was_proven_without_it() -> None:
    absent = FakePlatform("a")
    absent._availability = Availability(0, "no such device", usable=False, proven="Its kernels were interpreted.")
    points = [FakeEntryPoint("a", absent)]
    with pytest.raises(PlatformNotFoundError, match=r"no such device.*\nIts kernels were interpreted\."):
        choose_platform("a", points, trial=True)
    with pytest.raises(PlatformNotFoundError) as refused:
        choose_platform("a", points)
    assert "interpreted" not in str(refused.value)


class Emulated(FakePlatform):
    """Can run where an option asks for a stand-in."""

    def options(self) -> tuple[OptionSpec, ...]:
        return (OptionSpec(name="device", kind=str, default="real", help="which", choices=("real", "emulated")),)

    def configured(self, options: Any) -> Platform:
        return Emulated(self.name, usable=options["device"] == "emulated", reason=f"{options['device']} device")


def test_whether_a_platform_can_run_may_depend_on_its_options() -> None:
    points = [FakeEntryPoint("a", Emulated("a", usable=False))]
    assert choose_platform("a", points, options=("device=emulated",)).name == "a"
    with pytest.raises(PlatformNotFoundError, match="real device"):
        choose_platform("a", points, options=("device=real",))
    with pytest.raises(ConfigError, match="must be one of real, emulated"):
        choose_platform("a", points, options=("device=toy",))


def test_a_probe_that_raises_is_reported() -> None:
    points = [FakeEntryPoint("a", BrokenProbe("a"))]
    with pytest.raises(PlatformLoadError, match="failed while it was probed: OSError: driver went away"):
        choose_platform("a", points)
    assert survey(points)[0].error is not None


def test_platforms_that_take_a_format_are_found() -> None:
    points = [
        FakeEntryPoint("a", FakePlatform("a")),
        FakeEntryPoint("b", FakePlatform("b")),
        FakeEntryPoint("absent", FakePlatform("absent", usable=False)),
        FakeEntryPoint("broken", ImportError("x")),
    ]
    assert platforms_claiming(["Q4_1", "Q6_K"], "a", points) == {"Q4_1": ("b",), "Q6_K": ()}


def test_a_real_distribution_on_the_path_is_found(tmp_path: Path) -> None:
    """A dist-info folder as pip writes it, read by a fresh interpreter."""
    info = tmp_path / "acme_cardan-4.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-cardan\nVersion: 4.5\n")
    (info / "entry_points.txt").write_text("[cardan.platforms]\nacme = acme_cardan:platform\n")
    (tmp_path / "acme_cardan.py").write_text("import library_that_is_missing\n")
    program = """
        import sys
        from cardan.platform.discovery import find_plugins, load_platform
        from cardan.errors import PlatformLoadError
        found = [p for p in find_plugins() if p.name == "acme"]
        assert [p.origin for p in found] == ["acme-cardan 4.5"], found
        assert "acme_cardan" not in sys.modules
        try:
            load_platform("acme")
        except PlatformLoadError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "acme-cardan 4.5" in done.stdout
    assert "No module named 'library_that_is_missing'" in done.stdout


def test_asking_every_installed_platform_whether_it_can_run_imports_no_array_library():
    code = (
        "import sys; from cardan.platform.discovery import survey; print(len(survey()) > 0); "
        "print(sorted({'torch', 'triton', 'transformers', 'jax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["True", "[]"]
