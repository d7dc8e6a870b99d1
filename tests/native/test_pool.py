"""The thread pool of the native kernels by itself: a small C++ program that runs one scenario at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "kernels" / "native" / "src"
PROGRAM = Path(__file__).parent / "pool_program.cpp"
COMPILER = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
SCENARIOS = ("sizes", "idle", "sleepers", "two", "callers", "throwing", "forked", "pinned")
SANITIZERS = os.environ.get("CARDAN_POOL_SANITIZERS", "")
"""What `make native-sanitize` has the program built with."""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("pool") / "pool_program"
    cores = [str(SOURCES / "core" / name) for name in ("threads.cpp", "affinity.cpp")]
    flags = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{SOURCES}"]
    flags += [f"-fsanitize={SANITIZERS}"] if SANITIZERS else []
    command = [str(COMPILER), *flags, str(PROGRAM), *cores, "-o", str(built)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return built


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_pool_does_as_it_says(program: Path, scenario: str) -> None:
    if scenario == "forked" and SANITIZERS:
        pytest.skip("the sanitizers' own memory is not made for a fork while other threads allocate")
    done = subprocess.run([str(program), scenario], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_scenario_that_is_not_there_fails(program: Path) -> None:
    assert subprocess.run([str(program), "none"], capture_output=True, check=False).returncode == 2
