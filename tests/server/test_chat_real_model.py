"""A model that was trained to call functions, through the whole server, with OpenAI's own client."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_fakes import ServerThread

from cardan.config import CacheConfig, EngineConfig, GrammarConfig, ModelConfig, PlatformConfig, ServerConfig

FILE = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Name of the city"}},
                "required": ["city"],
            },
        },
    }
]
ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]

pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(scope="module")
def coder() -> Iterator[openai.OpenAI]:
    path = Path(os.environ.get("CARDAN_TEST_MODELS", "/nowhere")) / FILE
    if not path.is_file():
        pytest.skip(f"{FILE} is not in CARDAN_TEST_MODELS")
    config = EngineConfig(
        model=ModelConfig(model=str(path), served_model_name="coder"),
        platform=PlatformConfig(platform="cpu"),
        cache=CacheConfig(max_total_tokens=4096),
        # The first grammar waits for the backend to read the vocabulary, on a machine that runs other tests too.
        grammar=GrammarConfig(grammar_compile_timeout_s=120),
        server=ServerConfig(port=0, log_level="error"),
    )

    async def make() -> Any:
        from cardan.engine import Frontend

        return await Frontend.start(config)

    server = ServerThread(make, config).start()
    with server.openai() as api:
        yield api
    server.stop()


def test_it_calls_the_function(coder: openai.OpenAI) -> None:
    asked: Any = {"model": "coder", "messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": 120}
    choice = coder.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    assert choice.message.tool_calls is not None
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert "Paris" in arguments["city"]
    with coder.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert [
        (call.function.name, json.loads(call.function.arguments)) for call in streamed.message.tool_calls or []
    ] == [("get_weather", arguments)]
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature_c": 31, "sky": "sunny"}'}
    messages: Any = [*ASKED, choice.message.model_dump(), result]
    final = coder.chat.completions.create(**{**asked, "messages": messages, "tool_choice": "none"}).choices[0]
    assert final.finish_reason == "stop"
    assert "31" in (final.message.content or "")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_it_must_call(coder: openai.OpenAI, choice: Any) -> None:
    messages: Any = [{"role": "user", "content": "Tell me a joke about Rome."}]
    asked: Any = {"model": "coder", "messages": messages, "tools": TOOLS, "tool_choice": choice, "temperature": 0}
    answer = coder.chat.completions.create(**asked, max_tokens=60).choices[0]
    assert answer.finish_reason == "tool_calls", answer
    assert answer.message.content is None
    for call in answer.message.tool_calls or []:
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert isinstance(json.loads(call.function.arguments)["city"], str)


def test_it_answers_in_words_too(coder: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Say hello."}]
    choice = coder.chat.completions.create(
        model="coder", messages=messages, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=30
    ).choices[0]
    assert choice.message.tool_calls is None
    assert "ello" in (choice.message.content or "")
