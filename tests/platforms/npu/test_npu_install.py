"""What the NPU platform finds on a machine, without importing any of it, and what it says is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cardan_npu import install

CANN = "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux"


def machine(tmp_path: Path, cann: str | None = "8.5.0", devices: int = 1) -> Path:
    """A tree of what an installation leaves behind."""
    (tmp_path / "dev").mkdir()
    for index in range(devices):
        (tmp_path / "dev" / f"davinci{index}").touch()
    (tmp_path / "dev" / "davinci_manager").touch()
    if cann is not None:
        (tmp_path / CANN).mkdir(parents=True)
        (tmp_path / CANN / install.CANN_FILE).write_text(f"package_name=toolkit\nversion={cann}\narch=aarch64\n")
    return tmp_path


def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str = "2.8.0.post2") -> Path:
    folder = tmp_path / "site" / "torch_npu"
    folder.mkdir(parents=True)
    (folder / "version.py").write_text(f"__version__ = '{version}'\n")
    monkeypatch.setattr(install, "_package_folder", lambda: folder)
    return folder


def test_probing_imports_neither_torch_nor_torch_npu_and_says_what_is_missing():
    code = (
        "import sys, time; from cardan_npu import platform\n"
        "found = platform.probe()\n"
        "assert not {'torch', 'torch_npu'} & set(sys.modules), 'imported'\n"
        "print(found.usable, platform.devices(), found.reason)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False () ")
    for part in (
        "torch_npu is not installed",
        "no CANN toolkit is at",
        "no NPU (/dev/davinci0)",
        "(looked in ",
        " ms)",
    ):
        assert part in done.stdout


def test_looking_takes_no_time(tmp_path):
    assert install.find(machine(tmp_path), {}).milliseconds < 1000


def test_a_machine_with_everything_is_described(tmp_path, monkeypatch):
    package(tmp_path, monkeypatch)
    found = install.find(machine(tmp_path, devices=8), {})
    assert found.missing() == ()
    assert found.describe() == "torch_npu 2.8.0.post2 over CANN 8.5.0, 8 NPUs"


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"cann": None}, "install CANN and source its set_env.sh"), ({"devices": 0}, "install Ascend's driver")],
)
def test_each_missing_part_is_named_alone(tmp_path, monkeypatch, changes, said):
    package(tmp_path, monkeypatch)
    (lacking,) = install.find(machine(tmp_path, **changes), {}).missing()
    assert said in lacking


def test_the_environment_names_another_toolkit(tmp_path, monkeypatch):
    package(tmp_path, monkeypatch)
    other = tmp_path / "opt" / "cann"
    other.mkdir(parents=True)
    (other / install.CANN_FILE).write_text("version=9.0.0\n")
    found = install.find(machine(tmp_path), {"ASCEND_HOME_PATH": str(other)})
    assert (found.cann, found.cann_file.parent) == ("9.0.0", other)


def test_versions_that_do_not_belong_together_are_named_with_those_that_do(tmp_path, monkeypatch):
    package(tmp_path, monkeypatch, "2.8.0.post2")
    (lacking,) = install.find(machine(tmp_path, cann="9.0.0"), {}).missing()
    assert lacking.startswith("torch_npu 2.8.0.post2 and CANN 9.0.0 were found, which do not belong together")
    assert "torch_npu 2.8.0.post4 with CANN 9.0.0" in lacking
    assert lacking.endswith("Install one of these pairs")


def test_an_unknown_torch_npu_is_named_with_the_known_pairs():
    said = install.check_pair("2.1.0", "8.5.0")
    assert said is not None
    assert "torch_npu 2.1.0 and CANN 8.5.0 were found" in said
    assert "no known pair" in said


def test_fixes_of_a_release_belong_to_it_and_previews_do_not():
    assert install.check_pair("2.9.0", "8.5.0.1") is None
    assert install.check_pair("2.9.0", "8.5.0.alpha001") is not None
    assert install.check_pair("2.8.0.post4+git123", "8.5.0") is None


def test_toolkits_whose_attention_is_documented_otherwise_are_refused():
    said = install.check_pair("2.8.0.post4", "8.3.RC1")
    assert said is not None
    assert "torch_npu 2.8.0.post4 and CANN 8.3.RC1 were found, which do not belong together" in said
    assert "torch_npu 2.8.0.post4 with CANN 9.0.0, 8.5.0;" in said


def test_a_simulator_says_so(tmp_path, monkeypatch):
    folder = package(tmp_path, monkeypatch)
    (folder / install.SIMULATOR_MARK).touch()
    found = install.find(tmp_path, {})
    assert found.missing() == ()
    assert "is a simulator" in found.describe()
    assert "computed on the CPU" in found.describe()
