"""The routes that take a text apart, and how a server says and checks which parsers it has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from server_fakes import FakeEngine, ServerThread

from cardan.config import EngineConfig, ModelConfig, ServerConfig
from cardan.errors import ConfigError
from cardan.server import serve

CALL = 'Hm. <tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "now"}}]


def parsing_server(**model: Any) -> ServerThread:
    async def make() -> FakeEngine:
        return FakeEngine()

    return ServerThread(make, EngineConfig(model=ModelConfig(**model), server=ServerConfig(port=0))).start()


@pytest.fixture(scope="module")
def bare() -> Iterator[ServerThread]:
    server = parsing_server()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def parsing() -> Iterator[ServerThread]:
    server = parsing_server(tool_call_parser="hermes", reasoning_parser="deepseek-r1")
    yield server
    server.stop()


def test_function_calls(bare: ServerThread, parsing: ServerThread) -> None:
    body = {"text": CALL, "tools": TOOLS, "tool_call_parser": "qwen25"}
    expected = {"normal_text": "Hm.", "calls": [{"tool_index": 0, "name": "now", "parameters": '{"a": 1}'}]}
    assert bare.http.post("/parse_function_call", json=body).json() == expected
    del body["tool_call_parser"]
    assert parsing.http.post("/parse_function_call", json=body).json() == expected
    assert parsing.http.post("/parse_function_call", json={"text": CALL}).json() == expected
    body = {"text": "x " * 10000 + CALL}
    assert parsing.http.post("/parse_function_call", json=body).json()["calls"] == expected["calls"]
    other = {"text": CALL, "tools": [{"type": "function", "function": {"name": "launch"}}]}
    assert parsing.http.post("/parse_function_call", json=other).json() == {"normal_text": CALL, "calls": []}


def test_reasoning(bare: ServerThread, parsing: ServerThread) -> None:
    expected = {"reasoning_text": "a", "text": "b"}
    body = {"text": "<think>\na</think>\nb", "reasoning_parser": "qwen3"}
    assert bare.http.post("/separate_reasoning", json=body).json() == expected
    assert parsing.http.post("/separate_reasoning", json={"text": "a</think>b"}).json() == expected
    channels = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>"
    body = {"text": channels, "reasoning_parser": "gpt-oss"}
    assert bare.http.post("/separate_reasoning", json=body).json() == expected


@pytest.mark.parametrize(
    ("route", "body", "param", "message"),
    [
        ("parse_function_call", {"text": "x"}, "tool_call_parser", "--tool-call-parser"),
        ("separate_reasoning", {"text": "x"}, "reasoning_parser", "--reasoning-parser"),
        ("parse_function_call", {}, "text", "is required"),
        (
            "parse_function_call",
            {"text": "x", "tool_call_parser": "qwen"},
            "tool_call_parser",
            "expected auto, none, or",
        ),
        ("separate_reasoning", {"text": "x", "reasoning_parser": "hermes"}, "reasoning_parser", "one of deepseek-r1"),
        ("parse_function_call", {"text": "x", "tools": [1], "tool_call_parser": "hermes"}, "tools[0]", "an object"),
        ("separate_reasoning", {"text": "x", "tools": []}, "tools", "Unknown field"),
        ("separate_reasoning", {"text": "x" * (2**20 + 1)}, "text", "at most 1048576 characters"),
    ],
)
def test_bad_texts_to_parse(bare: ServerThread, route: str, body: Any, param: str, message: str) -> None:
    response = bare.http.post(f"/{route}", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_the_server_says_what_it_has(bare: ServerThread, parsing: ServerThread) -> None:
    assert bare.http.get("/server_info").json()["answers"] == {"tool_call_parser": None, "reasoning_parser": None}
    found = parsing.http.get("/server_info").json()["answers"]
    assert found == {"tool_call_parser": "hermes", "reasoning_parser": "deepseek-r1"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tool_call_parser": "hermse"}, "--tool-call-parser is 'hermse', expected auto, none, or one of deepseekv3"),
        ({"reasoning_parser": "r1"}, "--reasoning-parser is 'r1', expected auto, none, or one of deepseek-r1"),
        (
            {"tool_call_parser": "hermes", "reasoning_parser": "gpt-oss"},
            "--tool-call-parser hermes and --reasoning-parser gpt-oss cannot go together",
        ),
    ],
)
def test_wrong_parsers_end_the_start(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve(EngineConfig(model=ModelConfig(model="/nowhere", **flags), server=ServerConfig(port=0)))
