"""The program behind ``make fuzz-api``: which program it runs, and that its server ends with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fuzz_api
import pytest


def run(monkeypatch: pytest.MonkeyPatch, program: str) -> tuple[int, subprocess.Popen[str]]:
    """Run with a process in place of the server."""
    wait = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print(); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", wait], stdout=subprocess.PIPE, text=True)
    with process.stdout as out:  # type: ignore[union-attr]
        out.readline()
    monkeypatch.setattr(fuzz_api, "serve", lambda _folder: (process, "http://127.0.0.1:9"))
    monkeypatch.setattr(sys, "argv", ["fuzz_api.py", "--schemathesis", program, "--minutes", "1"])
    return fuzz_api.main(), process


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_is_found_from_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    program = tmp_path / "bin" / "fuzz"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\nexit {code}\n')
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    ended, process = run(monkeypatch, "bin/fuzz")
    assert ended == code
    assert process.returncode == 0
    said = (tmp_path / "said").read_text()
    assert said.startswith("run http://127.0.0.1:9/openapi.json --checks not_a_server_error,")
    assert "--max-time 60" in said


def test_there_is_no_such_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_api, "serve", lambda _folder: pytest.fail("a server was started"))
    monkeypatch.setattr(sys, "argv", ["fuzz_api.py", "--schemathesis", "nowhere/fuzz"])
    with pytest.raises(SystemExit, match="'nowhere/fuzz', which is no program"):
        fuzz_api.main()
