"""The check of IPEX: what it refuses and says, libraries that stand in for CUDA's, and its page."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cardan_cpu.ipex import IPEX


@pytest.fixture(scope="module")
def check(load_module: Any) -> Any:
    return load_module("ipex_check")


@pytest.fixture(scope="module")
def libraries(load_module: Any) -> Any:
    return load_module("ipex_libraries")


def cpuinfo(folder: Path, flags: str = "fpu avx2") -> Path:
    file = folder / "cpuinfo"
    file.write_text(f"model name : some\nflags : {flags}\n")
    return file


@pytest.fixture
def here(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which IPEX can be had."""
    monkeypatch.setattr(check.sys, "platform", "linux")
    monkeypatch.setattr(check.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(check, "python_minor", lambda: 12)
    monkeypatch.setattr(check.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10e9))


@pytest.mark.usefixtures("here")
def test_a_machine_that_can_is_let_through(check: Any, tmp_path: Path) -> None:
    check.check_machine(tmp_path / "ipex", cpuinfo(tmp_path))


@pytest.mark.usefixtures("here")
def test_what_a_machine_lacks_is_named(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(said: str, flags: str = "avx2") -> None:
        with pytest.raises(check.CannotBeHadError, match=said):
            check.check_machine(tmp_path / "ipex", cpuinfo(tmp_path, flags))

    refused("a processor with AVX2", "sse4_2")
    monkeypatch.setattr(check.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1e9))
    refused("needs 5 GB while it is made, and .* has 1.0")
    monkeypatch.setattr(check, "python_minor", lambda: 14)
    refused("for Python 3.11 to 3.13, and here is")
    monkeypatch.setattr(check.platform, "machine", lambda: "aarch64")
    refused("for Linux on x86_64, and here is linux aarch64")


@pytest.mark.usefixtures("here")
def test_where_it_cannot_be_had_the_command_says_why_and_ends_with_3(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pip_fails(command: Any, **options: Any) -> Any:
        fetching = "--no-deps" in command
        said = "ERROR: No matching distribution found for torch==2.8.0" if fetching else ""
        return subprocess.CompletedProcess(command, int(fetching), "", said)

    monkeypatch.setattr(check, "check_machine", lambda folder: None)
    monkeypatch.setattr(check.subprocess, "run", pip_fails)
    monkeypatch.setattr(check.sys, "argv", ["ipex_check.py", "--folder", str(tmp_path / "ipex")])
    assert check.main() == 3
    said = capsys.readouterr().err
    assert "IPEX cannot be tried here: fetching the packages failed with 1: ERROR: No matching distribution" in said
    assert "run make test-ipex again" in said
    assert not (tmp_path / "ipex" / "complete").exists()


def test_an_environment_that_is_complete_is_taken_as_it_is(check: Any, tmp_path: Path) -> None:
    (tmp_path / "complete").write_text(check.recipe())
    (tmp_path / "checkout").write_text(str(check.ROOT))
    assert check.set_up(tmp_path) == str(tmp_path / "bin" / "python")


def test_an_environment_of_another_checkout_gets_this_one(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(check, "run", lambda what, *command: ran.append(command))
    (tmp_path / "complete").write_text(check.recipe())
    (tmp_path / "checkout").write_text("/some/where/else")
    for _ in range(2):
        check.set_up(tmp_path)
    assert [command[-2:] for command in ran] == [("-e", str(check.ROOT))]
    assert (tmp_path / "checkout").read_text() == str(check.ROOT)


def test_an_environment_of_other_packages_is_made_again(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(check, "make", made.append)
    (tmp_path / "complete").write_text(check.recipe())
    (tmp_path / "checkout").write_text(str(check.ROOT))
    check.set_up(tmp_path)
    assert made == []
    monkeypatch.setattr(check, "PACKAGES", ("torch==2.8.1",))
    check.set_up(tmp_path)
    (tmp_path / "complete").write_text("")
    check.set_up(tmp_path)
    assert made == [tmp_path, tmp_path]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError("cc"), "FileNotFoundError: cc"),
        (subprocess.CalledProcessError(1, "cc", stderr="ld: no room"), "CalledProcessError: .* / ld: no room"),
        (StopIteration(), "StopIteration"),
    ],
)
def test_an_environment_that_cannot_be_made_is_none_that_can_be_had(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def make(folder: Path) -> None:
        raise error

    monkeypatch.setattr(check, "make", make)
    with pytest.raises(check.CannotBeHadError, match=f"making .* failed with {said}"):
        check.set_up(tmp_path)


def test_a_torch_that_needs_cuda_needs_a_compiler(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "libcudart.so.12: cannot open shared object file")
    monkeypatch.setattr(check.subprocess, "run", lambda *command, **options: failed)
    monkeypatch.setattr(check, "missing_tools", lambda: ["cc", "nm"])
    with pytest.raises(check.CannotBeHadError, match="and cc, nm, to make empty ones in their place, is missing"):
        check.start_torch("python", tmp_path)


@pytest.mark.skipif(any(shutil.which(tool) is None for tool in ("cc", "nm", "readelf")), reason="needs a C compiler")
def test_empty_libraries_let_one_load_that_was_built_for_cuda(libraries: Any, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    libraries.compile_library(elsewhere / "libcudacardan.so.0", "int cudaGetDeviceCount(void) { return 0; }", ())
    code = "int cudaGetDeviceCount(void); int devices(void) { return cudaGetDeviceCount(); }"
    flags = (str(elsewhere / "libcudacardan.so.0"), "-Wl,-rpath,$ORIGIN")
    libraries.compile_library(tmp_path / "libtorch_some.so", code, flags)
    with pytest.raises(OSError, match=r"libcudacardan\.so\.0"):
        ctypes.CDLL(str(tmp_path / "libtorch_some.so"))
    assert libraries.make_empty_libraries(tmp_path) == ["libcudacardan.so.0"]
    assert ctypes.CDLL(str(tmp_path / "libtorch_some.so")).devices() == libraries.NO_DEVICE
    assert libraries.make_empty_libraries(tmp_path) == []


def test_the_page_gets_what_was_measured_between_its_marks(check: Any, tmp_path: Path) -> None:
    kinds = {"prefill of 1024": 100.0, "decode of 8": 20.0}
    ms = {IPEX: kinds, "torch": {kind: 2 * value for kind, value in kinds.items()}, "native": kinds}
    section = check.render({"machine": "Some CPU", "foreign_cores": 0.1, "rounds": 3, "ms": ms})
    assert "| prefill of 1024 | 100.0 | 200.0 | 100.0 | 2.00 | 1.00 |" in section
    assert "Some CPU" in section
    page = tmp_path / "ipex.md"
    page.write_text("before\n<!-- measured:begin -->\nold\n<!-- measured:end -->\nafter\n")
    check.write(section, check.MARKS, page)
    assert page.read_text() == f"before\n<!-- measured:begin -->\n{section}<!-- measured:end -->\nafter\n"


def test_the_page_that_is_written_has_the_marks(check: Any) -> None:
    text = check.PAGE.read_text(encoding="utf-8")
    assert all(text.count(mark.strip()) == 1 for mark in (*check.VERIFIED, *check.MARKS))


def test_what_passed_is_counted(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def suite(command: list[str], **options: Any) -> Any:
        Path(command[2]).write_text('{"passed": 236, "skipped": 4}')
        assert command[3:] == ["attention"]
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(check, "machine", lambda: "Some CPU")
    monkeypatch.setattr(check.subprocess, "run", suite)
    counted = check.conform("python", ["attention"])
    said = check.render_verified(counted, "2.8.0 with AVX2")
    assert "Some CPU, IPEX 2.8.0 with AVX2: 236 checks of the suite passed, none failed, 4 were skipped.\n" in said
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(check.subprocess, "run", lambda *command, **options: failed)
    assert check.conform("python", []) is None


def test_a_run_that_fails_shows_what_it_said(
    check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = subprocess.CompletedProcess(["cardan"], 1, "", "cardan: no such model")
    monkeypatch.setattr(check.subprocess, "run", lambda *command, **options: failed)
    with pytest.raises(subprocess.CalledProcessError):
        check.steps_of("python", ())
    assert "no such model" in capsys.readouterr().err


@pytest.mark.parametrize(("foreign", "kept"), [(0.1, True), (1.2, False)])
def test_times_beside_other_work_do_not_go_to_the_page_and_what_passed_does(
    check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], foreign: float, kept: bool
) -> None:
    kinds = {"decode of 8": 20.0}
    found = {
        "machine": "Some CPU",
        "foreign_cores": foreign,
        "rounds": 1,
        "ms": dict.fromkeys(("ipex", "torch", "native"), kinds),
    }
    written: list[Any] = []
    monkeypatch.setattr(check, "check_machine", lambda folder: None)
    monkeypatch.setattr(check, "set_up", lambda folder: "python")
    monkeypatch.setattr(check, "isa_of", lambda python: "2.8.0 with AVX2")
    monkeypatch.setattr(check, "conform", lambda python, only: {"passed": 236, "skipped": 4})
    monkeypatch.setattr(check, "measure", lambda python, rounds: found)
    monkeypatch.setattr(check, "write", lambda section, marks: written.append(marks))
    monkeypatch.setattr(check.sys, "argv", ["ipex_check.py"])
    assert check.main() == 0
    assert written == [check.VERIFIED, check.MARKS][: 1 + kept]
    assert ("no evidence" in capsys.readouterr().out) == (not kept)
