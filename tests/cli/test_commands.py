"""The commands as a user runs them, on the platform without hardware."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from cardan.cli.app import EXIT_CONFIG, EXIT_FAILED, run
from cardan.platform import Availability
from cardan.testing import write_tiny_model
from cardan.testing.null_platform import NullPlatform

NULL = ("--model", "null", "--platform", "null", "--max-total-tokens", "4096")


def cardan(*arguments: str, text: str = "", timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from cardan.cli import main; main()", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^cardan \d+\.\d+\.\d+, platform API \d+$", out, re.MULTILINE)
    assert "platform null: cardan" in out


def test_short_commands_load_no_array_library() -> None:
    program = (
        "import sys; from cardan.cli.app import run; assert run(['version']) == 0; "
        "assert run(['serve', '--help']) == 0; "
        "assert not {'torch', 'mlx', 'transformers', 'uvicorn', 'zmq'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_platforms(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["platforms", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["null"]["state"] == "usable"
    assert {"cpu", "null"} <= set(rows)
    assert run(["platforms"]) == 0
    assert "null" in capsys.readouterr().out


def test_one_platform(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["platforms", "null"]) == 0
    out = capsys.readouterr().out
    assert "tensor_parallel" in out
    assert "step_ms" in out
    assert run(["platforms", "null", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["capabilities"]


def test_a_platform_that_cannot_run_here_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NullPlatform, "probe", lambda _: Availability(0, "there is nothing to fake", usable=False))
    assert run(["platforms", "null"]) == EXIT_FAILED
    assert "Platform 'null' cannot run on this machine: there is nothing to fake." in capsys.readouterr().err


def test_plan_shows_sources_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "null", "--platform", "null", "--page-size", "16", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["settings"]["page_size"] == {"value": 16, "source": "flag", "why": "--page-size"}
    assert plan["settings"]["context_length"]["source"] == "model"
    assert run(["plan", "--model", "null", "--platform", "null"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^page_size +1 +default +prefixes are shared token by token", out, re.MULTILINE)
    assert re.search(r"^max_queued_requests +none +default +no limit", out, re.MULTILINE)


def test_plan_shows_the_sampling_defaults_of_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    assert run(["plan", "--model", str(folder), "--platform", "null"]) == 0
    assert re.search(
        r"^sampling_defaults +temperature 0.6, top_k 20 +model +generation_config.json",
        capsys.readouterr().out,
        re.MULTILINE,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", "--platform", "gone"], EXIT_FAILED, "No platform plugin is named 'gone'"),
        (["plan", "--page-size", "0"], EXIT_CONFIG, "--page-size must be between 1 and 65536, got 0."),
        (["plan", "--model", "null", "--platform", "null", "--page-size", "3"], EXIT_CONFIG, "Pass --page-size 4."),
        (["plan", "--model", "/no/such/folder", "--platform", "null"], EXIT_FAILED, "/no/such/folder"),
        (["generate", *NULL], EXIT_CONFIG, "cardan generate needs a prompt, got none."),
        (["bench", "--base-url", "http://x", "--page-size", "3"], EXIT_CONFIG, "so --page-size has no effect"),
        (["bench", "--http-model", "x"], EXIT_CONFIG, "--http-model has no effect without --base-url, got 'x'."),
        (["bench", "--max-concurrency", "0"], EXIT_CONFIG, "--max-concurrency must be at least 1, got 0."),
        (["bench", "--warmup", "-1"], EXIT_CONFIG, "--warmup must be 0 or more, got -1."),
        (["bench", "--goodput", "fast"], EXIT_CONFIG, "--goodput must be like ttft:300,tpot:50"),
        (["bench", "scheduler", "--rows", "0"], EXIT_CONFIG, "--rows must be at least 1, got 0."),
    ],
)
def test_an_error_is_one_message_and_an_exit_code(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err.replace("\n", "")
    assert "Traceback" not in captured.err


def test_debug_shows_the_traceback() -> None:
    done = cardan("plan", "--model", "null", "--platform", "null", "--page-size", "3", "--log-level", "debug")
    assert done.returncode == EXIT_CONFIG
    assert "Traceback" in done.stderr
    assert "Pass --page-size 4." in done.stderr


def test_a_flag_that_does_not_exist_is_refused() -> None:
    done = cardan("plan", "--page-sise", "3")
    assert done.returncode == EXIT_CONFIG
    assert "--page-sise" in done.stderr


def test_generate_prints_the_answer_alone_on_standard_output() -> None:
    done = cardan("generate", "hello", *NULL, "--max-new-tokens", "6", "--seed", "3", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["meta_info"]["completion_tokens"] == 6
    streamed = cardan("generate", "--stdin", *NULL, "--max-new-tokens", "6", "--seed", "3", text="hello")
    assert streamed.stdout == answer["text"] + "\n"


def test_chat_keeps_the_conversation_and_takes_commands() -> None:
    done = cardan("chat", *NULL, "--max-new-tokens", "4", text="hello\nagain\n/reset\n/what\nhello\n/quit\nnever\n")
    assert done.returncode == 0, done.stderr
    turns = [tuple(map(int, turn)) for turn in re.findall(r"prompt (\d+), (\d+) of it cached", done.stderr)]
    assert len(turns) == 3
    assert turns[1][0] > turns[0][0]
    assert turns[1][1] > 0, "the second turn begins with the first"
    assert turns[2][0] == turns[0][0], "a reset forgets"
    assert "/reset begins anew" in done.stderr


def test_bench_measures_an_engine(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = cardan(
        *("bench", *NULL, "--num-prompts", "4", "--shared-prefix", "64", "--own", "8", "--random-output-len", "5"),
        *("--goodput", "ttft:60000", "--output-json", str(report)),
    )
    assert done.returncode == 0, done.stderr
    value = json.loads(report.read_text())
    assert (value["completed"], value["failed"]) == (4, 0)
    assert value["input_lens"] == [72, 72.0, 72]
    assert value["output_lens"] == [5, 5.0, 5]
    assert value["cached_tokens"] == 3 * 64
    assert value["goodput"] > 0
    assert value["target"]["plan"]["platform"] == "null"
    assert "goodput" in done.stdout


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", "from cardan.cli import main; main()", "serve", *NULL, "--port", "0"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ, "NO_COLOR": "1"}
    )
    assert process.stderr is not None
    try:
        yield process, read_until_ready(process.stderr)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()


def read_until_ready(stream: IO[str]) -> str:
    text = ""
    for line in stream:
        text += line
        if line.startswith("ready "):
            return text
    raise AssertionError(f"the server did not get ready:\n{text}")


def test_serve_shows_the_plan_and_the_address_and_ends_on_a_signal(
    server: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    process, text = server
    assert re.search(r"^max_total_tokens +4096 +flag", text, re.MULTILINE)
    assert re.search(r"^KV pool +", text, re.MULTILINE)
    found = re.search(r"^ready +(http://127\.0\.0\.1:\d+)/v1 serves (\S+);", text, re.MULTILINE)
    assert found is not None, text
    done = cardan("bench", "--base-url", found.group(1), "--num-prompts", "2", "--own", "8", "--random-output-len", "3")
    assert done.returncode == 0, done.stderr
    assert "2 answered, 0 failed" in done.stdout
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
