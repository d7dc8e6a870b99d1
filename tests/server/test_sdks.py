"""What outputs are held to, and where they stop, with the official clients and engines in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from anthropic_clients import claude_of, text_of
from server_fakes import FakeEngine, ServerThread

HELLO: Any = [{"role": "user", "content": "Where is the Louvre?"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
PLACES = ({"city": "Paris"}, {"city": "Rome"})


@pytest.fixture
def real(server: ServerThread) -> ServerThread:
    """The shared server, where its engine holds outputs to grammars."""
    if isinstance(server.engine, FakeEngine):
        pytest.skip("a fake engine holds outputs to no grammar")
    return server


@pytest.fixture
def claude(server: ServerThread) -> Iterator[anthropic.Anthropic]:
    with claude_of(server) as client:
        yield client


@pytest.fixture
def llama(server: ServerThread) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, verify=False) as client:
        yield client


def a_stop_in(text: str) -> str:
    """Some printable letters that an answer holds, not at its beginning."""
    for at in range(1, len(text) - 1):
        if text[at : at + 2].isascii() and text[at : at + 2].isprintable() and text[at : at + 2].strip():
            return text[at : at + 2]
    pytest.skip(f"the model wrote nothing to stop at: {text!r}")


def held(text: str | None) -> bool:
    return json.loads(text or "") in PLACES


# --- Anthropic ---


def test_anthropic_stops(claude: anthropic.Anthropic, model: str) -> None:
    asked: Any = {"model": model, "messages": HELLO, "max_tokens": 24, "extra_body": {"temperature": 0}}
    whole = text_of(claude.messages.create(**asked))
    stop = a_stop_in(whole)
    cut = claude.messages.create(**asked, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert text_of(cut) == whole[: whole.index(stop)]
    with claude.messages.stream(**asked, stop_sequences=[stop]) as stream:
        assert "".join(stream.text_stream) == text_of(cut)
        assert stream.get_final_message().stop_sequence == stop


def test_anthropic_must_call(real: ServerThread, claude: anthropic.Anthropic, model: str) -> None:
    tool: Any = {"name": "locate", "description": "Says where something is.", "input_schema": SCHEMA}
    asked: Any = {"model": model, "messages": HELLO, "max_tokens": 200, "tools": [tool]}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "locate"}):
        message = claude.messages.create(**asked, tool_choice=choice)
        assert message.stop_reason == "tool_use"
        (call,) = (block for block in message.content if isinstance(block, anthropic.types.ToolUseBlock))
        assert call.name == "locate"
        assert call.input in PLACES
    with claude.messages.stream(**asked, tool_choice={"type": "tool", "name": "locate"}) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    (call,) = (block for block in final.content if isinstance(block, anthropic.types.ToolUseBlock))
    assert json.loads("".join(parts)) == call.input
    assert call.input in PLACES


def test_anthropic_counts_what_it_reads(claude: anthropic.Anthropic, model: str) -> None:
    asked: Any = {"model": model, "messages": HELLO, "system": "Answer with one word."}
    counted = claude.messages.count_tokens(**asked).input_tokens
    usage = claude.messages.create(**asked, max_tokens=1).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted


# --- Ollama ---


def test_ollama_stops(llama: ollama.Client, model: str) -> None:
    options: Any = {"temperature": 0, "num_predict": 24}
    whole = llama.generate(model=model, prompt="Where is the Louvre?", options=options).response
    stop = a_stop_in(whole)
    cut = llama.generate(model=model, prompt="Where is the Louvre?", options={**options, "stop": [stop]})
    assert cut.response == whole[: whole.index(stop)]
    assert cut.done_reason == "stop"
    chatted = llama.chat(model=model, messages=HELLO, options={**options, "stop": [stop]}, stream=True)
    assert "".join(part.message.content or "" for part in chatted) == cut.response


def test_ollama_formats(real: ServerThread, llama: ollama.Client, model: str) -> None:
    options: Any = {"temperature": 0, "num_predict": 200}
    assert held(llama.chat(model=model, messages=HELLO, format=SCHEMA, options=options).message.content)
    assert held(llama.generate(model=model, prompt="Where?", format=SCHEMA, options=options).response)
    parts = llama.chat(model=model, messages=HELLO, format=SCHEMA, options=options, stream=True)
    assert held("".join(part.message.content or "" for part in parts))


def test_ollama_lists(llama: ollama.Client, client: httpx.Client, model: str) -> None:
    assert [listed.model for listed in llama.list().models] == [model]
    assert [loaded.model for loaded in llama.ps().models] == [model]
    shown = llama.show(model)
    assert "completion" in (shown.capabilities or [])
    assert client.get("/api/version").json()["version"]


# --- OpenAI ---


def test_responses_hold_to_a_schema(real: ServerThread, api: openai.OpenAI, model: str) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}}
    response = api.responses.create(model=model, input="Where is the Louvre?", text=form, max_output_tokens=200)
    assert response.status == "completed"
    assert held(response.output_text)
    with api.responses.stream(model=model, input="Where?", text=form, max_output_tokens=200) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text
    assert held(final.output_text)


def test_responses_must_call(real: ServerThread, api: openai.OpenAI, model: str) -> None:
    tool: Any = {"type": "function", "name": "locate", "description": "Says where.", "parameters": SCHEMA}
    asked: Any = {"model": model, "tools": [tool], "max_output_tokens": 200}
    first = api.responses.create(
        input="Where is the Louvre?", tool_choice={"type": "function", "name": "locate"}, **asked
    )
    (call,) = (item for item in first.output if item.type == "function_call")
    assert call.name == "locate"
    assert held(call.arguments)
    assert api.responses.retrieve(first.id).output == first.output
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "It is there."}]
    asked["max_output_tokens"] = 4
    next_one = api.responses.create(input=result, previous_response_id=first.id, tool_choice="none", **asked)
    assert next_one.previous_response_id == first.id
    alone = api.responses.create(input="It is there.", tool_choice="none", **asked)
    assert next_one.usage is not None
    assert alone.usage is not None
    assert next_one.usage.input_tokens > alone.usage.input_tokens
    api.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(first.id)


def test_chats_hold_to_a_schema_and_must_call(real: ServerThread, api: openai.OpenAI, model: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    asked: Any = {"model": model, "messages": HELLO, "max_tokens": 200}
    assert held(api.chat.completions.create(**asked, response_format=form).choices[0].message.content)
    tool: Any = {"type": "function", "function": {"name": "locate", "parameters": SCHEMA}}
    choice = api.chat.completions.create(
        **asked, tools=[tool], tool_choice="required", parallel_tool_calls=False
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert held(call.function.arguments)
