"""What `make` would install and run, on this machine and on Apple silicon."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
MAC, LINUX = "Darwin arm64", "Linux x86_64"

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def would_run(folder: Path, uname: str, *targets: str, **variables: str) -> str:
    """The commands of a dry run that starts from nothing."""
    settings = {"UNAME": uname, "VENV": str(folder / "venv"), "CARDAN_CACHE": str(folder / "cache"), **variables}
    words = ["make", "--dry-run", *targets, *(f"{name}={value}" for name, value in settings.items())]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def installed(commands: str) -> set[str]:
    """The extras that the commands install."""
    lines = [line for line in commands.splitlines() if "pip install" in line and "-e '.[" in line]
    assert lines
    return {extra for line in lines for extra in line.partition("'.[")[2].partition("]'")[0].split(",")}


@needs_make
def test_the_demo_runs_on_mlx_on_a_mac_and_on_the_cpu_elsewhere(tmp_path: Path) -> None:
    assert installed(would_run(tmp_path, MAC, "demo")) == {"mlx"}
    assert installed(would_run(tmp_path, LINUX, "demo")) == {"cpu"}


@needs_make
def test_the_kernels_of_the_cpu_are_built_where_they_are_used_and_only_once(tmp_path: Path) -> None:
    for target in ("demo", "test", "test-more", "conform", "bench"):
        assert "./kernels/native" in would_run(tmp_path, LINUX, target), target
        assert "./kernels/native" not in would_run(tmp_path, MAC, target), target
    stamp = tmp_path / "venv" / "installed-native"
    (stamp.parent / "bin").mkdir(parents=True)
    (stamp.parent / "bin" / "python").touch()
    stamp.touch()
    assert "./kernels/native" not in would_run(tmp_path, LINUX, "demo")


@needs_make
@pytest.mark.parametrize(
    ("compiler", "install", "shown"),
    [
        ("no-such-compiler", "true", "No C++ compiler, so the CPU platform computes with torch."),
        ("true", "false", "The CPU's kernels were not built (see "),
        ("true", "true", ""),
    ],
)
def test_without_the_kernels_of_the_cpu_everything_else_goes_on(
    tmp_path: Path, compiler: str, install: str, shown: str
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    settings = {"UNAME": LINUX, "VENV": str(tmp_path), "CXX": compiler, "PIP": install}
    words = ["make", str(tmp_path / "installed-native"), *(f"{name}={value}" for name, value in settings.items())]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown in done.stdout
    assert ("computes with torch" in done.stdout) == bool(shown)
    assert (tmp_path / "installed-native").exists()


@needs_make
def test_the_tests_install_no_torch_on_a_mac(tmp_path: Path) -> None:
    for target in ("test", "test-more", "mac-check", "conform"):
        assert installed(would_run(tmp_path, MAC, target)) == {"mlx", "test"}
    extras = {"cpu", "mlx", "test", "test-torch", "test-kernels", "xgrammar"}
    assert installed(would_run(tmp_path, LINUX, "test")) == extras
    assert "not metal" not in would_run(tmp_path, MAC, "test")
    assert "not metal" in would_run(tmp_path, LINUX, "test")


@needs_make
def test_conform_tries_the_platform_of_the_machine_or_the_one_named(tmp_path: Path) -> None:
    assert "conform --platform mlx" in would_run(tmp_path, MAC, "conform")
    assert "conform --platform cpu" in would_run(tmp_path, LINUX, "conform")
    asked = would_run(tmp_path, MAC, "conform", P="cpu")
    assert "conform --platform cpu" in asked
    assert "cpu" in installed(asked)


def test_the_extras_that_a_mac_installs_bring_no_torch() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("mlx", "test"):
        assert not [need for need in extras[extra] if need.startswith(("torch", "accelerate"))]


def test_the_readme_says_whether_metal_was_run() -> None:
    run = list(EVIDENCE.glob("mac-*.json")) if EVIDENCE.is_dir() else []
    for page in ("README.md", "docs/platforms/mlx.md"):
        assert ("Metal has not been run" in (ROOT / page).read_text()) == (not run), page
