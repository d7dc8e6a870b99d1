"""Start a server with a small model, ask it one question through the OpenAI endpoint, and show what came and how fast.

It needs nothing but Cardan itself: the client is the standard library's.
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SYSTEM = "You are a helpful assistant. Answer in one sentence."
QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
START_TIMEOUT_S = 280.0


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the server takes requests; exit when it ends or takes too long."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            sys.exit(f"demo: the server ended with exit code {server.returncode} before it was ready")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.05)
    sys.exit(f"demo: the server was not ready within {START_TIMEOUT_S:.0f} s")


def ask(port: int, question: str) -> tuple[str, list[float], dict[str, int]]:
    """Stream one chat completion to the terminal; returns text, times of its pieces, and usage."""
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        sys.exit(f"demo: HTTP {reply.status}: {reply.read().decode(errors='replace')}")
    text, times, usage = "", [], {}
    for line in reply:
        data = line.decode().removeprefix("data:").strip()
        if not line.startswith(b"data:") or data == "[DONE]":
            continue
        event = json.loads(data)
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            if piece:
                times.append(time.monotonic())
                text += piece
                sys.stdout.write(piece)
                sys.stdout.flush()
    connection.close()
    sys.stdout.write("\n")
    return text, times, usage


def show_times(rows: list[tuple[str, str]]) -> None:
    """An aligned table."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        sys.stdout.write(f"  {name:<{width}}  {value}\n")


def main() -> int:
    """Run the demo; returns the exit code."""
    port = free_port()
    started_s = time.monotonic()
    command = [str(Path(sys.executable).with_name("cardan")), "serve", "--model", "smollm2-135m", "--port", str(port)]
    # One question needs few rows and a small pool; a server that is to be used would leave both out.
    limits = ["--max-running-requests", "4", "--max-total-tokens", "8192"]
    server = subprocess.Popen([*command, *limits, "--log-level", "warning"])
    try:
        wait_ready(server, port)
        ready_s = time.monotonic()
        sys.stdout.write(f"\n> {QUESTION}\n")
        sys.stdout.flush()
        asked_s = time.monotonic()
        text, times, usage = ask(port, QUESTION)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            code = server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            code = server.wait()
    decode_s = times[-1] - times[0] if len(times) > 1 else 0.0
    rate = (usage.get("completion_tokens", 0) - 1) / decode_s if decode_s else 0.0
    sys.stdout.write("\n")
    show_times(
        [
            ("start until ready", f"{ready_s - started_s:.2f} s"),
            ("time to first token", f"{1000 * (times[0] - asked_s):.0f} ms" if times else "-"),
            ("prompt tokens", str(usage.get("prompt_tokens", "-"))),
            ("output tokens", f"{usage.get('completion_tokens', '-')} at {rate:.1f} tokens/s"),
            ("server's exit code", str(code)),
        ]
    )
    if EXPECTED not in text:
        sys.stdout.write(f"demo: FAILED, the answer does not name {EXPECTED}\n")
        return 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
