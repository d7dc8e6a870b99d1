"""Runs schemathesis against a server on the null platform, from the server's own OpenAPI document.

python tests/support/fuzz_api.py --schemathesis PROGRAM --minutes 15
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from cardan.testing import write_tiny_model

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
"""What must hold of every answer. That a body of the document is accepted is not among it: the document cannot say that
a model's context is too short, or that two fields exclude each other."""


def serve(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A server in processes of its own, and its address."""
    command = [str(Path(sys.executable).with_name("cardan")), "serve", "--platform", "null", "--port", "0"]
    command += ["--model", str(write_tiny_model(folder / "tiny")), "--served-model-name", "tiny"]
    command += [
        "--log-format",
        "json",
        # So short that whatever is asked for ends well within the time of one request.
        "--context-length",
        "512",
        "--request-timeout-s",
        "20",
        "--chat-template",
        "llama3",
        "--tool-call-parser",
        "llama3",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        entry = json.loads(line) if line.startswith("{") else {}
        if entry.get("message") == "ready":
            # What it says later is shown as it comes.
            threading.Thread(target=lambda: sys.stderr.writelines(process.stderr or ()), daemon=True).start()
            return process, str(entry["url"])
        sys.stderr.write(line)
    raise SystemExit("The server did not get ready; what it said is above.")


def main() -> int:
    """Run; returns schemathesis's exit code, or 1 when the server did not live through it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemathesis", default="schemathesis", help="the program")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    program = shutil.which(options.schemathesis)
    if program is None:
        raise SystemExit(f"--schemathesis is {options.schemathesis!r}, which is no program. Install schemathesis 4.")
    with tempfile.TemporaryDirectory() as folder:
        process, url = serve(Path(folder))
        try:
            # It writes into the folder that it runs in.
            command = [str(Path(program).absolute()), "run", f"{url}/openapi.json", "--checks", ",".join(CHECKS)]
            command += ["--max-time", str(int(options.minutes * 60)), "--workers", str(options.workers)]
            command += ["--request-timeout", "30", "--seed", "1", "--continue-on-failure", "--warnings", "off"]
            code = subprocess.run(command, check=False, cwd=folder).returncode
        finally:
            process.terminate()
            try:
                ended = process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                ended = process.wait()
    if ended:
        print(f"The server ended with {ended} instead of 0.", file=sys.stderr)  # noqa: T201
    return code or int(ended != 0)


if __name__ == "__main__":
    sys.exit(main())
