"""``/v1/messages`` with Anthropic's own client, on every kind of engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic_clients import HELLO, TOOL, claude_of, events_of, text_of
from server_fakes import ServerThread

ENDLESS: Any = {"max_tokens": 8, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def shared_claude(shared_server: ServerThread) -> Iterator[anthropic.Anthropic]:
    with claude_of(shared_server) as claude:
        yield claude


@pytest.fixture
def claude(server: ServerThread, shared_claude: anthropic.Anthropic) -> anthropic.Anthropic:
    return shared_claude


def test_message(claude: anthropic.Anthropic, model: str) -> None:
    message = claude.messages.create(model=model, messages=HELLO, system="Be brief.", **ENDLESS)
    assert message.type == "message"
    assert message.role == "assistant"
    assert message.model == model
    assert message.id.startswith("msg_")
    assert message._request_id == message.id
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert 0 < message.usage.output_tokens <= 8
    assert message.usage.input_tokens > 0


def test_counts_add_up(claude: anthropic.Anthropic, model: str) -> None:
    asked: Any = {"model": model, "system": "Count.", "messages": [{"role": "user", "content": "Count this, please"}]}
    count = claude.messages.count_tokens(**asked).input_tokens
    for _ in range(2):
        usage = claude.messages.create(**asked, **ENDLESS).usage
        assert usage.cache_read_input_tokens is not None
        assert usage.input_tokens + usage.cache_read_input_tokens == count
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (1, count - 1)
    longer = claude.messages.count_tokens(**{**asked, "system": "Count these words."}).input_tokens
    assert longer > count


def test_stream_equals_whole(claude: anthropic.Anthropic, model: str) -> None:
    whole = claude.messages.create(model=model, messages=HELLO, **ENDLESS)
    with claude.messages.stream(model=model, messages=HELLO, **ENDLESS) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == text_of(whole) == text_of(final)
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens == 1
    types = [event.type for event in claude.messages.create(model=model, messages=HELLO, stream=True, **ENDLESS)]
    assert types[:2] == ["message_start", "content_block_start"]
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(types[2:-3]) == {"content_block_delta"}


def test_events_one_by_one(client: httpx.Client, model: str) -> None:
    events = events_of(client, model=model, temperature=0)
    assert [name for name, _ in events][:3] == ["message_start", "ping", "content_block_start"]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert events[2][1] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert all(event["index"] == 0 for name, event in events if name == "content_block_delta")
    assert events[-2][1]["usage"]["output_tokens"] > 0
    assert events[-1][1] == {"type": "message_stop"}


def test_async_client(server: ServerThread, model: str) -> None:
    async def ask() -> Any:
        async with (
            anthropic.AsyncAnthropic(
                base_url=server.url,
                api_key="none",
                max_retries=0,
                http_client=anthropic.DefaultAsyncHttpxClient(verify=False),
            ) as claude,
            claude.messages.stream(model=model, messages=HELLO, **ENDLESS) as stream,
        ):
            texts = [text async for text in stream.text_stream]
            return texts, await stream.get_final_message()

    texts, final = asyncio.run(ask())
    assert "".join(texts) == text_of(final)


def test_stop_sequence(start_fake: Any) -> None:
    server = start_fake()
    with claude_of(server) as claude:
        text = text_of(claude.messages.create(model="tiny", messages=HELLO, **ENDLESS))
        stopped = claude.messages.create(model="tiny", messages=HELLO, stop_sequences=["#", text[3]], **ENDLESS)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[3])
        assert text_of(stopped) == text[: text.index(text[3])]
        cut = claude.messages.create(model="tiny", messages=HELLO, **ENDLESS)
        assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
        ended = claude.messages.create(model="tiny", messages=[{"role": "user", "content": "[eos]"}], **ENDLESS)
        assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
        server.engine.clamp = 8
        full = claude.messages.create(model="tiny", messages=HELLO, **ENDLESS)
        assert full.stop_reason == "model_context_window_exceeded"


def _prompt_of(server: ServerThread) -> str:
    return str(server.engine.tokenizer.decode(server.engine.seen[-1].input_ids, skip_special_tokens=False))


def test_conversations_become_prompts(start_fake: Any) -> None:
    server = start_fake()
    user = {"role": "user", "content": "x"}
    two = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"system": "S"}, "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"),
        ({"system": two}, "<|im_start|>system\na\nb<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"),
        ({"messages": [{"role": "user", "content": two}]}, "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"),
        ({"messages": [user, user]}, "<|im_start|>user\nx\nx<|im_end|>\n<|im_start|>assistant\n"),
        (
            {"messages": [{"role": "system", "content": "S"}, user]},
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            {"messages": [user, {"role": "assistant", "content": "Once"}]},
            "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nOnce",
        ),
        (
            {"messages": [user, {"role": "assistant", "content": two}, user]},
            "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nab<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
    ]
    for fields, prompt in cases:
        body = {"messages": [user], "max_tokens": 1, **fields}
        response = server.http.post("/v1/messages", json=body)
        assert response.status_code == 200, response.text
        assert _prompt_of(server) == prompt


def test_fields_reach_the_engine(start_fake: Any) -> None:
    server = start_fake()
    body = {
        "messages": HELLO,
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stop_sequences": ["zz", "yy"],
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
    }
    response = server.http.post(
        "/v1/messages?beta=true", json=body, headers={"anthropic-version": "1999-01-01", "anthropic-beta": "x"}
    )
    assert response.status_code == 200, response.text
    sampling = server.engine.seen[-1].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 5)
    assert sampling.stop == ("zz", "yy")


USER = {"role": "user", "content": "x"}


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "'messages' is required"),
    ({"messages": []}, "'messages' is empty"),
    ({"messages": ["x"]}, "'messages[0]' must be an object"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "'messages[0].role' is 'tool'; it must be one of user"),
    ({"messages": [{"role": "user"}]}, "'messages[0].content' is required"),
    ({"messages": [{"role": "user", "content": []}]}, "'messages[0].content' must be a string, or a list of blocks"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "'messages[0].content[0]' must be an object like"),
    ({"max_tokens": None}, "'max_tokens' is required"),
    ({"max_tokens": 0}, "'max_tokens' should be greater than or equal to 1"),
    ({"temperature": -1}, "'temperature' should be greater"),
    ({"top_k": 0}, "'top_k' must be a whole number above 0"),
    ({"stop_sequences": [""]}, "'stop_sequences' must not hold an empty string"),
    ({"stream": "yes"}, "'stream' should be a valid boolean"),
    ({"max_token": 5}, "Did you mean 'max_tokens'"),
    ({"prompt": "x"}, "this route takes 'messages'"),
    ({"container": "c"}, "only Anthropic's own service has"),
    ({"mcp_servers": [{"url": "x"}]}, "declare their tools in 'tools'"),
    ({"system": 5}, "'system' must be a string, or a list of blocks"),
    ({"system": [{"type": "image", "source": {}}]}, "only text is taken"),
    (
        block(type="image", source={"type": "url", "url": "x"}),
        "'messages[0].content[0]' has type 'image', but only text",
    ),
    (block(type="document", source={}), "has type 'document', but only text is taken"),
    (block(type="tool_use", id="a", name="f", input={}), "here only text, tool_result may stand"),
    (block(type="redacted_thinking", data="x"), "only Anthropic's service can read"),
    (block(type="text"), "'messages[0].content[0].text' is required"),
    (block(type="text", text="x", citations=[{}]), "documents are not cited"),
    (block(type="text", text="x", colour=1), "Unknown field 'messages[0].content[0].colour'"),
    (block(type="tool_result", tool_use_id="a", content="x"), "no earlier message of the assistant has a 'tool_use'"),
    (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            ]
        },
        "The last message calls tools; their results must follow it",
    ),
    ({"tools": ["x"]}, "'tools[0]' must be an object with 'name'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "that Anthropic's service defines or runs"),
    ({"tools": [{"name": "f"}]}, "'tools[0].input_schema' is required"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "all tools are shown to the model"),
    ({"tool_choice": {"type": "any"}}, "'tool_choice' needs 'tools'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "'tool_choice.name' names the tool"),
    ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "look"}}, "'tool_choice.name' names the tool"),
    ({"tools": [TOOL], "tool_choice": {"type": "maybe"}}, "'tool_choice.type' should be 'auto', 'any', 'tool'"),
    ({"thinking": {"type": "much"}}, "'thinking.type' should be 'enabled'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "'thinking.budget_tokens' should be greater"),
    ({"output_config": {"effort": "huge"}}, "'output_config.effort' should be 'low'"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "'output_config.format.schema' must be a JSON schema"),
    ({"output_config": {"format": {"type": "xml"}}}, "'output_config.format.type' should be 'json_schema'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[f"{i}-{sorted(bad[0])[0]}" for i, bad in enumerate(BAD)])
def test_bad_requests_are_named(client: httpx.Client, fields: dict[str, Any], message: str) -> None:
    response = client.post("/v1/messages", json={"messages": [USER], "max_tokens": 1, **fields})
    assert response.status_code == 400, response.text
    told = response.json()
    assert told["type"] == "error"
    assert told["error"]["type"] == "invalid_request_error"
    assert message in told["error"]["message"]


def test_typed_errors(start_fake: Any) -> None:
    server = start_fake(api_key="secret")
    asked: Any = {"model": "tiny", "messages": HELLO, **ENDLESS}
    with claude_of(server) as claude, pytest.raises(anthropic.AuthenticationError) as wrong:
        claude.messages.create(**asked)
    assert wrong.value.body == {
        "type": "error",
        "error": {"type": "authentication_error", "message": wrong.value.body["error"]["message"]},  # type: ignore[index]
    }
    with claude_of(server, api_key="secret") as claude:
        assert claude.messages.create(**asked).content
        with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
            claude.messages.create(**{**asked, "model": "claude-opus"})
        with pytest.raises(anthropic.BadRequestError, match="more than the"):
            claude.messages.create(**{**asked, "messages": [{"role": "user", "content": "x" * 4095}]})
        server.engine.full = True
        with pytest.raises(anthropic.OverloadedError, match="Too many requests wait"):
            claude.messages.create(**asked)
        server.engine.full = False
        nan: Any = {**asked, "messages": [{"role": "user", "content": "[nan]"}]}
        with pytest.raises(anthropic.InternalServerError, match="The logits hold NaN"):
            claude.messages.create(**nan)
        with pytest.raises(anthropic.APIStatusError, match="The logits hold NaN"):
            list(claude.messages.create(**nan, stream=True))
    with claude_of(server, api_key=None, auth_token="secret") as claude:
        assert claude.messages.create(**asked).content


def test_other_errors_have_the_form_too(start_fake: Any) -> None:
    server = start_fake(max_body_bytes=100)
    assert server.http.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    assert server.http.post("/v1/messages/batches").json()["error"]["type"] == "not_found_error"
    large = server.http.post("/v1/messages", json={"messages": [{"role": "user", "content": "x" * 200}]})
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    assert (
        server.http.post("/v1/messages?colour=1", json={})
        .json()["error"]["message"]
        .startswith("This route takes only beta as query parameters, got 'colour'.")
    )


def test_an_abort_is_told(start_fake: Any) -> None:
    server = start_fake()
    server.engine.delay_s = 0.02
    events: list[str] = []
    body = {"messages": HELLO, "max_tokens": 4000, "stream": True}
    with server.http.stream("POST", "/v1/messages", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("event: "):
                events.append(line.removeprefix("event: "))
            if events.count("content_block_delta") == 2 and "abort" not in events:
                events.append("abort")
                server.call(server.engine.abort(None))
            if "aborted" in line:
                told = json.loads(line.removeprefix("data: "))
    assert events[-1] == "error"
    assert told["error"]["type"] == "api_error"
