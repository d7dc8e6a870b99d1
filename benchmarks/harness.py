"""Runs tasks of lm-evaluation-harness against Cardan's server, through OpenAI's completions or chats.

It knows no task and no score: the harness reads, asks and judges. It is looked for in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
START_S = 600
"""Until a server must be ready."""
END_S = 90
"""Longer than a server takes at most to end what it was asked."""


class HarnessError(Exception):
    """Tasks cannot be run; the text says why."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the flags; what follows ``--`` is the server's."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--harness", type=Path, required=True, help="the program lm_eval")
    parser.add_argument("--tasks", nargs="+", default=["cardan_choices", "cardan_answers"], help="by their names")
    parser.add_argument("--include", type=Path, default=ROOT / "benchmarks" / "tasks", help="a folder of more tasks")
    parser.add_argument("--out", type=Path, required=True, help="a folder for results and all answers")
    parser.add_argument("--chat", action="store_true", help="ask by chats, as the model's template writes them")
    parser.add_argument("--limit", type=int, help="only the first items of each task")
    parser.add_argument("server", nargs="*", help="flags of cardan serve, after --")
    return parser.parse_args(arguments)


@contextmanager
def serving(flags: Sequence[str], log: Path) -> Iterator[tuple[str, str]]:
    """A server that is ready: its address, and what its model is called.

    Raises:
        HarnessError: it ended, or was not ready in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("cardan")), "serve", *flags, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            _wait(process, f"{url}/ready", log)
            with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
                yield url, json.load(answer)["data"][0]["id"]
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise HarnessError(f"cardan serve ended with exit code {process.returncode}; see {log}.")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise HarnessError(f"cardan serve was not ready after {START_S} s; see {log}.")


def command_of(flags: argparse.Namespace, url: str, model: str) -> list[str]:
    """How the harness is called."""
    kind, route = ("local-chat-completions", "chat/completions") if flags.chat else ("local-completions", "completions")
    # The server tokenizes, so that the harness needs no tokenizer of the model; chats are sent as they are.
    asked = {"model": model, "base_url": f"{url}/v1/{route}", "num_concurrent": 4}
    if not flags.chat:
        asked["tokenizer_backend"] = "remote"
    found = [str(flags.harness.absolute()), "run", "--model", kind]
    found += ["--model_args", ",".join(f"{name}={value}" for name, value in asked.items())]
    found += ["--tasks", ",".join(flags.tasks), "--include_path", str(flags.include)]
    found += ["--output_path", str(flags.out), "--log_samples"]
    if flags.chat:
        found.append("--apply_chat_template")
    return found if flags.limit is None else [*found, "--limit", str(flags.limit)]


def main(arguments: Sequence[str]) -> int:
    """Serve, run the tasks, and end; the exit code is the harness's."""
    flags = parse(arguments)
    if not flags.harness.is_file():
        print(f"{flags.harness} is not there; make accuracy-harness installs it.", file=sys.stderr)  # noqa: T201
        return 2
    flags.out, flags.include = flags.out.absolute(), flags.include.absolute()
    flags.out.mkdir(parents=True, exist_ok=True)
    try:
        with serving(flags.server, flags.out / "server.log") as (url, model):
            # what it fetches stays with what it gives
            env = {"HF_HOME": str(flags.out / "huggingface"), **os.environ}
            return subprocess.run(command_of(flags, url, model), check=False, cwd=ROOT, env=env).returncode
    except HarnessError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
