"""Tools and reasoning in the chat API, with OpenAI's own client and answers that a fake engine is told to give."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from server_fakes import ServerThread, say

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CLOCK = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.fixture
def api(tool_server: ServerThread) -> Iterator[openai.OpenAI]:
    with tool_server.openai() as client:
        yield client
    tool_server.wait_idle()


def asking(text: str, **fields: Any) -> dict[str, Any]:
    """A request whose answer is ``text``."""
    return {"model": "tiny", "messages": [{"role": "user", "content": say(text)}], "tools": [WEATHER, NOW], **fields}


def test_a_call(api: openai.OpenAI) -> None:
    choice = api.chat.completions.create(**asking(PARIS)).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_reasoning_words_and_two_calls(api: openai.OpenAI) -> None:
    text = f"<think>\nHm.\n</think>\n\nLet me see.\n{PARIS}\n{CLOCK}"
    message = api.chat.completions.create(**asking(text)).choices[0].message
    assert message.content == "Let me see."
    assert message.model_extra == {"reasoning_content": "Hm."}
    assert [call.function.name for call in message.tool_calls or []] == ["get_weather", "now"]
    assert len({call.id for call in message.tool_calls or []}) == 2


def test_a_raw_stream(api: openai.OpenAI) -> None:
    text = f"<think>Hm.</think>Let me see.\n{PARIS}\n{CLOCK}"
    chunks = list(api.chat.completions.create(**asking(text), stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    calls: dict[int, list[Any]] = {}
    for delta in deltas:
        for call in delta.tool_calls or []:
            calls.setdefault(call.index, []).append(call)
    assert sorted(calls) == [0, 1]
    for pieces in calls.values():
        assert pieces[0].id
        assert pieces[0].type == "function"
        assert pieces[0].function.name
        assert all(piece.id is None and piece.function.name is None for piece in pieces[1:])
    assert len(calls[0]) > 5, "arguments come as they are made"
    arguments = ["".join(piece.function.arguments for piece in pieces) for pieces in calls.values()]
    assert [json.loads(text) for text in arguments] == [{"city": "Paris"}, {}]
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])


def test_the_clients_own_stream(api: openai.OpenAI) -> None:
    with api.chat.completions.stream(**asking(f"So:\n{PARIS}")) as stream:
        kinds = [event.type for event in stream]
    final = stream.get_final_completion().choices[0]
    assert "content.delta" in kinds
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "So:"
    (call,) = final.message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Paris"}


@pytest.mark.parametrize(
    "text",
    [
        'Look: <tool_call>{"name": "launch", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": {"city": oops}}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Par',
        "<tool_call>",
    ],
)
def test_what_is_no_call_is_content(api: openai.OpenAI, text: str) -> None:
    choice = api.chat.completions.create(**asking(text)).choices[0]
    assert choice.message.content == text
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    chunks = list(api.chat.completions.create(**asking(text), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_call_that_the_limit_cuts_off(api: openai.OpenAI) -> None:
    choice = api.chat.completions.create(**asking(PARIS, max_tokens=60)).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content == PARIS[:60]
    assert choice.message.tool_calls is None


def test_choices_have_calls_of_their_own(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(**asking(PARIS, n=3))
    ids = [(choice.message.tool_calls or [])[0].id for choice in answer.choices]
    assert len(set(ids)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_a_time(api: openai.OpenAI, stream: bool) -> None:
    asked = asking(f"{PARIS}\n{CLOCK}", parallel_tool_calls=False)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in api.chat.completions.create(**asked, stream=True)]
        names = [call.function.name for delta in deltas for call in delta.tool_calls or [] if call.id]
    else:
        names = [
            call.function.name for call in api.chat.completions.create(**asked).choices[0].message.tool_calls or []
        ]
    assert names == ["get_weather"]


def grammar_of(server: ServerThread) -> Any:
    grammar = server.engine.seen[-1].sampling.grammar
    return grammar, json.loads(grammar.text)


def test_a_forced_call(api: openai.OpenAI, tool_server: ServerThread) -> None:
    text = '<think>t</think>[{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Rome"}}]'
    choice = api.chat.completions.create(**asking(text, tool_choice="required")).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert [call.function.name for call in choice.message.tool_calls or []] == ["now", "get_weather"]
    grammar, schema = grammar_of(tool_server)
    assert grammar.kind == "json_schema"
    assert bytes(grammar.starts_after) == b"</think>"
    assert (schema["type"], schema["minItems"], "maxItems" in schema) == ("array", 1, False)
    assert [item["properties"]["name"] for item in schema["items"]["anyOf"]] == [
        {"const": "get_weather"},
        {"const": "now"},
    ]
    api.chat.completions.create(**asking("[]", tool_choice="required", parallel_tool_calls=False))
    assert grammar_of(tool_server)[1]["maxItems"] == 1


def test_a_named_function(api: openai.OpenAI, tool_server: ServerThread) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    text = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
    asked = asking(f"<think></think>{text}", tool_choice=named)
    choice = api.chat.completions.create(**asked).choices[0]
    assert [call.function.name for call in choice.message.tool_calls or []] == ["get_weather"]
    assert choice.message.content is None
    assert grammar_of(tool_server)[1] == {
        "type": "object",
        "properties": {"name": {"const": "get_weather"}, "arguments": WEATHER["function"]["parameters"]},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    with api.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].finish_reason == "tool_calls"


def test_schemas_that_refer_to_themselves(api: openai.OpenAI, tool_server: ServerThread) -> None:
    tree = {
        "properties": {"root": {"$ref": "#/$defs/Node"}},
        "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}},
    }
    tool: Any = {"type": "function", "function": {"name": "plant", "parameters": tree}}
    api.chat.completions.create(**asking("x", tools=[tool], tool_choice="required"))
    _, schema = grammar_of(tool_server)
    moved = schema["$defs"]["arguments0"]
    assert schema["items"]["properties"]["arguments"] == {"$ref": "#/$defs/arguments0"}
    assert moved["properties"]["root"] == {"$ref": "#/$defs/arguments0/$defs/Node"}
    assert moved["$defs"]["Node"]["properties"]["next"] == {"$ref": "#/$defs/arguments0/$defs/Node"}


def test_strict_functions(api: openai.OpenAI, tool_server: ServerThread) -> None:
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    message = api.chat.completions.create(**asking(f"<think></think>{PARIS}", tools=[strict, NOW])).choices[0].message
    assert message.tool_calls
    grammar, tags = grammar_of(tool_server)
    assert grammar.kind == "structural_tag"
    assert tags["triggers"] == ["<tool_call>"]
    first, second = tags["structures"]
    assert first["begin"] == '<tool_call>\n{"name": "get_weather", "arguments": '
    assert first["end"] == "}\n</tool_call>"
    assert first["schema"] == WEATHER["function"]["parameters"]
    assert second["schema"] == {"type": "object"}
    api.chat.completions.create(**asking("x", tools=[strict], tool_choice="required"))
    assert grammar_of(tool_server)[0].allow_unenforced is False


def test_calls_and_other_grammars(tool_server: ServerThread) -> None:
    body = asking("x", response_format={"type": "json_object"})
    response = tool_server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "leave no room for calls" in response.json()["error"]["message"]
    body["tool_choice"] = "none"
    assert tool_server.http.post("/v1/chat/completions", json=body).status_code == 200
    assert bytes(tool_server.engine.seen[-1].sampling.grammar.starts_after) == b"</think>"


def test_without_tools_calls_are_words(api: openai.OpenAI, tool_server: ServerThread) -> None:
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        asked = {name: value for name, value in asking(PARIS, **fields).items() if value is not None}
        choice = api.chat.completions.create(**asked).choices[0]
        assert choice.message.content == PARIS
        assert choice.finish_reason == "stop"
        assert "tools" not in tool_server.engine.tokenizer.rendered


def test_reasoning_fields(api: openai.OpenAI) -> None:
    text = "<think>One. Two.</think>Three."
    whole = api.chat.completions.create(**asking(text), extra_body={"separate_reasoning": False}).choices[0].message
    assert whole.content == text
    assert not whole.model_extra
    streamed = list(api.chat.completions.create(**asking(text), stream=True, extra_body={"stream_reasoning": False}))
    thoughts = [(chunk.choices[0].delta.model_extra or {}).get("reasoning_content") for chunk in streamed]
    assert [thought for thought in thoughts if thought] == ["One. Two."]
    at = next(index for index, thought in enumerate(thoughts) if thought)
    first_word = next(index for index, chunk in enumerate(streamed) if chunk.choices[0].delta.content)
    assert at < first_word
    cut = list(
        api.chat.completions.create(
            **asking("<think>only"), stream=True, extra_body={"stream_reasoning": False, "separate_reasoning": True}
        )
    )
    assert [d for chunk in cut if (d := (chunk.choices[0].delta.model_extra or {}).get("reasoning_content"))] == [
        "only"
    ]


def test_logprobs_of_calls(api: openai.OpenAI) -> None:
    text = f"<think>Hm.</think>{PARIS}"
    whole = api.chat.completions.create(**asking(text), logprobs=True).choices[0]
    chunks = list(api.chat.completions.create(**asking(text), logprobs=True, stream=True))
    assert whole.logprobs is not None
    tokens = [entry.token for entry in whole.logprobs.content or []]
    assert "".join(tokens[:-1]) == text
    streamed = [
        entry.token
        for chunk in chunks
        for entry in (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    ]
    assert streamed == tokens


def test_usage_in_every_chunk(api: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(api.chat.completions.create(**asking("Four"), stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert chunks[-1].choices == []


def test_what_the_template_gets(api: openai.OpenAI, tool_server: ServerThread) -> None:
    calls = [{"id": "a1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]
    history: Any = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a1", "content": [{"type": "text", "text": "12:00"}]},
        {"role": "assistant", "content": "Noon.", "reasoning_content": "easy"},
        {"role": "user", "content": say("Yes.")},
    ]
    api.chat.completions.create(model="tiny", messages=history, tools=[WEATHER, NOW])
    rendered = tool_server.engine.tokenizer.rendered
    assert rendered["tools"] == [WEATHER, NOW]
    assert rendered["messages"] == [
        history[0],
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "12:00", "tool_call_id": "a1"},
        history[3],
        history[4],
    ]


def test_an_answer_goes_back_as_it_came(api: openai.OpenAI) -> None:
    asked = asking(f"<think>t</think>w {PARIS}")
    message = api.chat.completions.create(**asked).choices[0].message
    again: Any = [*asked["messages"], message.model_dump(), {"role": "tool", "tool_call_id": "x", "content": "sun"}]
    assert api.chat.completions.create(model="tiny", messages=again, tools=[WEATHER], max_tokens=1).choices
    with api.chat.completions.stream(**asked) as stream:
        parsed = stream.get_final_completion().choices[0].message
    again[1] = parsed.model_dump()
    assert api.chat.completions.create(model="tiny", messages=again, tools=[WEATHER], max_tokens=1).choices


def test_reasoning_effort(tool_server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tool_server.engine.tokenizer

    def ask(effort: str, **fields: Any) -> Any:
        body = {**asking("x"), "reasoning_effort": effort, **fields}
        return tool_server.http.post("/v1/chat/completions", json=body)

    monkeypatch.setattr(tokenizer, "variables", frozenset({"reasoning_effort", "enable_thinking"}))
    assert ask("high").status_code == 200
    assert tokenizer.rendered["reasoning_effort"] == "high"
    assert "enable_thinking" not in tokenizer.rendered
    for variable in ("enable_thinking", "thinking"):
        monkeypatch.setattr(tokenizer, "variables", frozenset({variable}))
        for effort, on in (("none", False), ("low", True)):
            assert ask(effort).status_code == 200
            assert tokenizer.rendered[variable] is on
    refused = ask("none", chat_template_kwargs={"thinking": True})
    assert refused.status_code == 400
    assert "contradict" in refused.json()["error"]["message"]


BAD_TOOLS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [5]}, "tools[0]", "must be an object"),
    ({"tools": "x"}, "tools", "valid list"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
    ({"tools": [{"type": "function", "function": "x"}]}, "tools[0].function", "with a 'name'"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "is required"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "1 to 128 characters"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "1 to 128 characters"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
        "tools[0].function.parameters",
        "valid dictionary",
    ),
    ({"tools": [NOW, NOW]}, "tools[1].function.name", "name of its own"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "only functions"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "only functions"),
    ({"tools": [{**NOW, "colour": 1}]}, "tools[0].colour", "Unknown field"),
    ({"tools": [NOW] * 1025}, "tools", "at most 1024 tools, got 1025"),
    ({"tool_choice": "maybe"}, "tool_choice", "must be 'none', 'auto', 'required'"),
    ({"tool_choice": {"type": "function", "function": {"name": "launch"}}}, "tool_choice", "none of the 'tools'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "can be chosen"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.allowed_tools", "only the tools"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "must be a string"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls", "list of at most"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]", "must be an object"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
        "messages[0].tool_calls[0].function",
        "is required",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x", "type": "custom", "function": {}}]}]},
        "messages[0].tool_calls[0].function",
        "of type 'function'",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": {}}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "valid string",
    ),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "valid boolean"),
    ({"stream_reasoning": 1}, "stream_reasoning", "valid boolean"),
]


@pytest.mark.parametrize(
    ("fields", "param", "message"), BAD_TOOLS, ids=[f"{i}-{b[1]}" for i, b in enumerate(BAD_TOOLS)]
)
def test_bad_tools_are_named(tool_server: ServerThread, fields: dict[str, Any], param: str, message: str) -> None:
    response = tool_server.http.post("/v1/chat/completions", json={**asking("x"), **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "get_weather", "arguments": {"city": 5}}',
        f"<think>I could {PARIS} here",
        f"<think>I could {PARIS} here</think>No.",
        f"I could {PARIS} here</think>No.",
        PARIS,
    ],
    ids=["without-tags", "unclosed-reasoning", "in-reasoning", "before-the-tag", "without-reasoning"],
)
def test_what_no_grammar_holds_is_no_strict_call(api: openai.OpenAI, text: str) -> None:
    """Without ``strict`` such texts are calls; their arguments are held to nothing."""
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    for fields in ({}, {"extra_body": {"separate_reasoning": False}}):
        message = api.chat.completions.create(**asking(text, tools=[strict, NOW], **fields)).choices[0].message
        assert not message.tool_calls
        reasoning = (message.model_extra or {}).get("reasoning_content") or ""
        assert "get_weather" in (message.content or "") + reasoning
    assert api.chat.completions.create(**asking(text)).choices[0].message.tool_calls


def test_parsers_can_be_turned_off(start_chat: Callable[..., ServerThread]) -> None:
    server = start_chat(tool_call_parser="none", reasoning_parser="none")
    body = asking(f"<think>t</think>{PARIS}")
    assert "--tool-call-parser" in server.http.post("/v1/chat/completions", json=body).json()["error"]["message"]
    body |= {"tool_choice": "required", "messages": asking('[{"name": "now", "arguments": {}}]')["messages"]}
    assert server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["tool_calls"]
    body = asking(f"<think>t</think>{PARIS}")
    del body["tools"]
    message = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": f"<think>t</think>{PARIS}", "refusal": None}


@pytest.mark.parametrize("stream", [False, True])
def test_generation_ends_with_the_only_call(tool_server: ServerThread, stream: bool) -> None:
    """With ``parallel_tool_calls`` false nothing is generated behind the first call, on every API of chats."""
    server = tool_server
    first = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    text = first + "x" * 300
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": say(text)}], "tools": [tool], "max_tokens": 900}
    asked |= {"model": "tiny", "stream": stream, "parallel_tool_calls": False}
    if stream:
        asked["stream_options"] = {"include_usage": True}
        body = server.http.post("/v1/chat/completions", json=asked).text
        chunks = [json.loads(line[6:]) for line in body.split("\n\n") if line.startswith("data: {")]
        finish = chunks[-2]["choices"][0]["finish_reason"]
        usage = chunks[-1]["usage"]
    else:
        whole = server.http.post("/v1/chat/completions", json=asked).json()
        finish, usage = whole["choices"][0]["finish_reason"], whole["usage"]
        assert len(whole["choices"][0]["message"]["tool_calls"]) == 1
    assert finish == "tool_calls"
    assert usage["completion_tokens"] < len(text) - 200
    server.wait_idle()
    message = server.http.post(
        "/v1/messages",
        json={
            "model": "tiny",
            "max_tokens": 900,
            "messages": [{"role": "user", "content": say(text)}],
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
    ).json()
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens"] < len(text) - 200
    server.wait_idle()


def test_a_template_without_tools_is_named_before_a_format_of_calls(start_fake: Callable[..., ServerThread]) -> None:
    server = start_fake()
    server.engine.tokenizer.chat_templates = {"default": "{{ messages[0].content }}"}
    for fields in ({}, {"tool_choice": "required"}):
        response = server.http.post("/v1/chat/completions", json=asking("x", **fields))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
        message = response.json()["error"]["message"]
        assert "--chat-template chatml" in message
        assert "--tool-call-parser" not in message
