"""Code of a model cannot hang a test, eat the memory or the disk, or talk to anyone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sandbox import run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of a process are Linux's")


def test_code_that_ends_well_says_so(tmp_path: Path) -> None:
    assert run_python("import math\nassert math.gcd(12, 18) == 6\n", tmp_path).well


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("assert 1 == 2, 'not so'", "AssertionError: not so"),
        ("x = bytearray(2 << 30)", "MemoryError"),
        ("open('big', 'wb').write(bytes(4 << 20))", "File too large"),
        ("import urllib.request; urllib.request.urlopen('http://127.0.0.1:9/', timeout=2)", "there is no network here"),
        ("import os; os._exit(3)", "exit code 3"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_what_goes_wrong_is_told(tmp_path: Path, code: str, said: str) -> None:
    ended = run_python(code, tmp_path)
    assert not ended.well
    assert said in ended.said


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)"])
def test_code_that_does_not_end_is_stopped(tmp_path: Path, code: str) -> None:
    assert not run_python(code, tmp_path, seconds=1).well
