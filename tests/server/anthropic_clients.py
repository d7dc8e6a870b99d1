"""Anthropic's client of a test server, and what its answers hold."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
from server_fakes import ServerThread

HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}


def claude_of(server: ServerThread, **kwargs: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=server.url,
        max_retries=0,
        http_client=anthropic.DefaultHttpxClient(verify=False),
        **({"api_key": "none"} | kwargs),
    )


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def events_of(client: httpx.Client, **body: Any) -> list[tuple[str, Any]]:
    body = {"messages": HELLO, "max_tokens": 4, "stream": True, **body}
    with client.stream("POST", "/v1/messages", json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    names, data = lines[::2], lines[1::2]
    events = []
    for name, line in zip(names, data, strict=True):
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append((event["type"], event))
    return events
