"""Tools and thinking on ``/v1/messages`` with Anthropic's own client and answers that a fake engine is told to give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic_clients import TOOL, claude_of, events_of, text_of
from server_fakes import ServerThread, say

PARIS = '<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call>'
ROME = '<tool_call>{"name": "look", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.fixture
def tool_claude(tool_server: ServerThread) -> Iterator[anthropic.Anthropic]:
    with claude_of(tool_server) as claude:
        yield claude
    tool_server.wait_idle()


def asking(text: str, **fields: Any) -> dict[str, Any]:
    """A request whose answer is ``text``."""
    return {"model": "tiny", "max_tokens": 400, "messages": [{"role": "user", "content": say(text)}], **fields}


THINK: Any = {"type": "enabled", "budget_tokens": 1024}


def test_thinking_words_and_two_calls(tool_claude: anthropic.Anthropic) -> None:
    asked = asking(f"<think>Hm.</think>Let me see.\n{PARIS}\n{ROME}", tools=[TOOL], thinking=THINK)
    whole = tool_claude.messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, words, first, second = whole.content
    assert isinstance(thought, anthropic.types.ThinkingBlock)
    assert (thought.thinking, len(thought.signature)) == ("Hm.", 64)
    assert isinstance(words, anthropic.types.TextBlock)
    assert words.text == "Let me see."
    assert isinstance(first, anthropic.types.ToolUseBlock)
    assert isinstance(second, anthropic.types.ToolUseBlock)
    assert (first.name, first.input, second.input) == ("look", {"city": "Paris"}, {"city": "Rome"})
    assert first.id != second.id
    assert whole.stop_reason == "tool_use"
    with tool_claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    plain = [block.model_dump(exclude={"id"}) for block in whole.content]
    assert [block.model_dump(exclude={"id", "parsed_output"}) for block in final.content] == plain
    assert final.stop_reason == "tool_use"
    assert kinds.count("input_json") > 10, "inputs come as they are made"
    assert {"thinking", "signature", "text", "content_block_stop"} <= set(kinds)


@pytest.mark.parametrize("value", ["1e999", "-" + "9" * 310, '"\\ud800"'], ids=["huge", "digits", "half-a-pair"])
def test_arguments_that_no_reader_can_hold_are_no_call(tool_server: ServerThread, value: str) -> None:
    text = f'<tool_call>{{"name": "look", "arguments": {{"city": {value}}}}}</tool_call>'
    asked = {"model": "tiny", **asking(text, tools=[TOOL])}
    whole = tool_server.http.post("/v1/messages", json=asked)
    assert whole.status_code == 200, whole.text
    assert [block["type"] for block in whole.json()["content"]] == ["text"]
    assert whole.json()["content"][0]["text"] == text
    streamed = tool_server.http.post("/v1/messages", json={**asked, "stream": True}).text
    assert '"stop_reason":"end_turn"' in streamed
    assert "api_error" not in streamed
    function = {"name": "look", "parameters": {"type": "object"}}
    asked = {"model": "tiny", "messages": asked["messages"], "tools": [{"type": "function", "function": function}]}
    line = tool_server.http.post("/api/chat", json={**asked, "stream": False})
    assert line.json()["message"]["content"] == text


def test_events_of_blocks_follow_each_other(tool_server: ServerThread) -> None:
    text = f"<think>Hm.</think>See.\n{PARIS}"
    events = events_of(tool_server.http, **asking(text, tools=[TOOL], thinking=THINK))
    begun = [event for name, event in events if name == "content_block_start"]
    assert [event["index"] for event in begun] == [0, 1, 2]
    assert begun[2]["content_block"]["input"] == {}
    open_index = None
    for name, event in events:
        if name == "content_block_start":
            assert open_index is None
            open_index = event["index"]
        elif name.startswith("content_block"):
            assert event["index"] == open_index
            open_index = None if name == "content_block_stop" else open_index
    assert open_index is None
    inputs = [event["delta"]["partial_json"] for _, event in events if event.get("delta", {}).get("partial_json")]
    assert json.loads("".join(inputs)) == {"city": "Paris"}


def test_thinking_is_shown_to_those_who_ask(tool_claude: anthropic.Anthropic) -> None:
    text = "<think>Hm.</think>Yes."
    for thinking in (None, {"type": "disabled"}):
        extra = {} if thinking is None else {"thinking": thinking}
        assert [block.type for block in tool_claude.messages.create(**asking(text, **extra)).content] == ["text"]
    for thinking in (THINK, {"type": "adaptive"}, {**THINK, "display": "summarized"}):
        message = tool_claude.messages.create(**asking(text, thinking=thinking))
        assert [block.type for block in message.content] == ["thinking", "text"]
    asked = asking(text, thinking={**THINK, "display": "omitted"})
    empty = tool_claude.messages.create(**asked).content[0]
    assert isinstance(empty, anthropic.types.ThinkingBlock)
    assert (empty.thinking, len(empty.signature)) == ("", 64)
    with tool_claude.messages.stream(**asked) as stream:
        assert stream.get_final_message().content[0].model_dump() == empty.model_dump()


def test_a_switch_of_the_template_is_thrown(tool_server: ServerThread) -> None:
    tokenizer = tool_server.engine.tokenizer
    tokenizer.variables = frozenset({"enable_thinking"})
    try:
        for thinking, expected in ((THINK, True), ({"type": "disabled"}, False), ({"type": "adaptive"}, None)):
            body = asking("x", thinking=thinking)
            assert tool_server.http.post("/v1/messages", json=body).status_code == 200
            assert tokenizer.rendered.get("enable_thinking") == expected
        body = asking("x", output_config={"effort": "high"})
        assert tool_server.http.post("/v1/messages", json=body).status_code == 200
        assert tokenizer.rendered["enable_thinking"] is True
    finally:
        tokenizer.variables = frozenset()


def test_thinking_without_a_model_that_thinks(start_fake: Any) -> None:
    server = start_fake()
    for fields, name in (
        ({"thinking": THINK}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ):
        response = server.http.post("/v1/messages", json=asking("x", **fields))
        assert response.status_code == 400
        assert f"'{name}' has no effect" in response.json()["error"]["message"]
    for thinking in ({"type": "disabled"}, {"type": "adaptive"}):
        assert server.http.post("/v1/messages", json=asking("x", thinking=thinking)).status_code == 200


def test_a_call_that_breaks_off_is_text(tool_claude: anthropic.Anthropic) -> None:
    text = '<tool_call>{"name": "look", "arguments": {"city": oops}}</tool_call>'
    message = tool_claude.messages.create(**asking(text, tools=[TOOL]))
    assert text_of(message) == text
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason == "end_turn"
    with tool_claude.messages.stream(**asking(text, tools=[TOOL])) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert text_of(final) == text


def test_one_call_only(tool_claude: anthropic.Anthropic) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = tool_claude.messages.create(**asking(PARIS + ROME, tools=[TOOL], tool_choice=choice))
    assert [block.type for block in message.content] == ["tool_use"]
    none = tool_claude.messages.create(**asking(PARIS, tools=[TOOL], tool_choice={"type": "none"}))
    assert text_of(none) == PARIS


def test_calls_and_results_in_the_history(tool_server: ServerThread, tool_claude: anthropic.Anthropic) -> None:
    first = tool_claude.messages.create(**asking(f"<think>Hm.</think>See.{PARIS}", tools=[TOOL], thinking=THINK))
    call = first.content[-1]
    assert isinstance(call, anthropic.types.ToolUseBlock)
    parts: Any = [{"type": "text", "text": "Rain"}, {"type": "text", "text": "15 C"}]
    history: Any = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": parts,
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "tool_result", "tool_use_id": call.id, "is_error": True},
                {"type": "tool_result", "tool_use_id": call.id, "is_error": True, "content": "gone"},
                {"type": "text", "text": say("It rains.")},
            ],
        },
    ]
    asked: Any = {"model": "tiny", "max_tokens": 99, "messages": history, "tools": [TOOL]}
    assert text_of(tool_claude.messages.create(**asked)) == "It rains."
    messages = tool_server.engine.tokenizer.rendered["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "tool", "user"]
    said = messages[1]
    assert (said["content"], said["reasoning_content"]) == ("See.", "Hm.")
    assert said["tool_calls"][0]["function"]["name"] == "look"
    assert [message["content"] for message in messages[2:5]] == ["Rain\n15 C", "Error", "Error: gone"]
    assert {message["tool_call_id"] for message in messages[2:5]} == {call.id}
    shown = tool_server.engine.tokenizer.rendered["tools"][0]["function"]
    assert shown == {"name": "look", "description": "Looks.", "parameters": TOOL["input_schema"]}


def test_tools_need_a_model_whose_calls_are_known(start_fake: Any) -> None:
    response = start_fake().http.post("/v1/messages", json=asking("x", tools=[TOOL]))
    assert response.status_code == 400
    assert "--tool-call-parser" in response.json()["error"]["message"]
