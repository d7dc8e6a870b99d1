"""``/v1/responses`` with OpenAI's own client."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_fakes import ServerThread, say

from cardan.server.openai.responses.store import ResponseStore, StoredResponse

GREEDY: Any = {"max_output_tokens": 8, "temperature": 0}


def test_response(api: openai.OpenAI, model: str) -> None:
    response = api.responses.create(model=model, input="Hello", instructions="Be brief.", metadata={"a": "b"}, **GREEDY)
    assert response.id.startswith("resp_")
    assert response.object == "response"
    assert response.model == model
    assert response.status in ("completed", "incomplete")
    assert response.output_text
    assert response.output[0].type == "message"
    assert response.metadata == {"a": "b"}
    assert response.temperature == 0
    usage = response.usage
    assert usage is not None
    assert 0 < usage.output_tokens <= 8
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_stream_equals_whole(api: openai.OpenAI, model: str) -> None:
    whole = api.responses.create(model=model, input="Hello", **GREEDY)
    events = list(api.responses.create(model=model, input="Hello", stream=True, **GREEDY))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    last: Any = events[-1]
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert last.response.usage.output_tokens == whole.usage.output_tokens if whole.usage else False


def test_async_client(server: ServerThread, model: str) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=False),
        ) as api:
            return (await api.responses.create(model=model, input="Hello", **GREEDY)).output_text

    assert asyncio.run(ask())


def test_logprobs(api: openai.OpenAI, model: str) -> None:
    response = api.responses.create(model=model, input="Hello", top_logprobs=2, **GREEDY)
    item = response.output[0]
    assert item.type == "message"
    part = item.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert response.usage is not None
    assert len(part.logprobs) == response.usage.output_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    plain = api.responses.create(
        model=model, input="Hello", include=["message.output_text.logprobs"], stream=True, **GREEDY
    )
    streamed = [
        entry.token for event in plain if event.type == "response.output_text.delta" for entry in event.logprobs
    ]
    assert streamed == [entry.token for entry in part.logprobs]


def test_stored_responses(api: openai.OpenAI, model: str) -> None:
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    ]
    response = api.responses.create(model=model, input=items, **GREEDY)
    assert api.responses.retrieve(response.id).model_dump() == response.model_dump()
    listed = api.responses.input_items.list(response.id, order="asc").data
    assert [item.role for item in listed if item.type == "message"] == ["developer", "user"]
    newest = api.responses.input_items.list(response.id, limit=1)
    assert newest.data[0].id == listed[1].id
    assert newest.has_more is True
    assert [item.id for item in newest] == [listed[1].id, listed[0].id], "the client reads further pages"
    api.responses.delete(response.id)
    for ask in (api.responses.retrieve, api.responses.delete, api.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="was never stored, was deleted, or made room"):
            ask(response.id)
    unstored = api.responses.create(model=model, input="Hi", store=False, **GREEDY)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(unstored.id)


@pytest.fixture
def tool_api(tool_server: ServerThread) -> Iterator[openai.OpenAI]:
    with tool_server.openai() as api:
        yield api
    tool_server.wait_idle()


TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": None}
PARIS = '<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_a_conversation_goes_on(tool_server: ServerThread, tool_api: openai.OpenAI) -> None:
    first = tool_api.responses.create(
        model="tiny", instructions="S", input=say(f"<think>Hm.</think>See.{PARIS}"), tools=[TOOL]
    )
    call = first.output[-1]
    assert call.type == "function_call"
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    second = tool_api.responses.create(
        model="tiny",
        previous_response_id=first.id,
        input=[*output, {"role": "user", "content": "And now?"}],
        tools=[TOOL],
    )
    assert second.output_text
    assert second.previous_response_id == first.id
    messages = tool_server.engine.tokenizer.rendered["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"], "without instructions"
    said = messages[1]
    assert (said["content"], said["reasoning_content"]) == ("See.", "Hm.")
    assert (said["tool_calls"][0]["id"], messages[2]["tool_call_id"]) == (call.call_id, call.call_id)
    # the same, with the items sent back
    items: Any = [
        {"role": "user", "content": "x"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        *output,
    ]
    tool_api.responses.create(model="tiny", input=items, tools=[TOOL], max_output_tokens=2)
    resent = tool_server.engine.tokenizer.rendered["messages"]
    assert resent[1] == said
    with pytest.raises(openai.BadRequestError, match="is not kept here") as lost:
        tool_api.responses.create(model="tiny", input="x", previous_response_id="resp_none")
    assert lost.value.code == "previous_response_not_found"


def test_the_clients_own_stream(tool_api: openai.OpenAI) -> None:
    with tool_api.responses.stream(model="tiny", input=say("Yes, it is.")) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == "Yes, it is."
    assert tool_api.responses.retrieve(final.id).output_text == final.output_text


def test_reasoning_words_and_a_call(tool_api: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": say(f"<think>Hm.</think>See.\n{PARIS}"), "tools": [TOOL]}
    whole = tool_api.responses.create(**asked)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    thought, _, call = whole.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "Hm."
    assert whole.output_text == "See."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("look", {"city": "Paris"}, "completed")
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    with tool_api.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert kinds.count("response.function_call_arguments.delta") > 5
    assert kinds.count("response.function_call_arguments.done") == 1
    assert "response.reasoning_text.delta" in kinds
    indices = [event.output_index for event in events if hasattr(event, "output_index")]
    assert all(b - a in (0, 1) for a, b in itertools.pairwise(indices))
    assert indices[-1] == 2


def test_a_call_that_breaks_off_is_a_message(tool_api: openai.OpenAI) -> None:
    text = '<tool_call>{"name": "look", "arguments": {"city": oops}}</tool_call>'
    whole = tool_api.responses.create(model="tiny", input=say(text), tools=[TOOL])
    assert [item.type for item in whole.output] == ["message"]
    assert whole.output_text == text
    events = list(tool_api.responses.create(model="tiny", input=say(text), tools=[TOOL], stream=True))
    done: Any = [event for event in events if event.type == "response.output_item.done"]
    assert [(event.item.type, event.item.status) for event in done] == [
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]
    last: Any = events[-1]
    assert last.response.output_text == text


def test_the_limit_makes_it_incomplete(tool_api: openai.OpenAI) -> None:
    cut = tool_api.responses.create(model="tiny", input="x", max_output_tokens=3)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].type == "message"
    assert cut.output[0].status == "incomplete"
    assert tool_api.responses.create(model="tiny", input=say("x")).status == "completed"


def test_failures(tool_api: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="The logits hold NaN"):
        tool_api.responses.create(model="tiny", input="[nan]")
    *_, last = tool_api.responses.create(model="tiny", input="[nan]", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "NaN" in last.response.error.message
    failed = tool_api.responses.create(model="tiny", input="[nan]", background=True)
    while (failed := tool_api.responses.retrieve(failed.id)).status in ("queued", "in_progress"):
        time.sleep(0.01)
    assert failed.status == "failed"
    with pytest.raises(openai.BadRequestError, match="is failed; only one that has an answer"):
        tool_api.responses.create(model="tiny", input="x", previous_response_id=failed.id)


def test_background(start_fake: Any) -> None:
    server = start_fake()
    server.engine.delay_s = 0.01
    with server.openai() as api:
        begun = api.responses.create(model="tiny", input="Hello", background=True, max_output_tokens=5)
        assert begun.status == "queued"
        seen = [begun.status]
        while seen[-1] in ("queued", "in_progress"):
            seen.append(api.responses.retrieve(begun.id).status)
        assert seen[-1] == "incomplete"
        assert len(api.responses.retrieve(begun.id).output_text) == 5
        assert api.responses.cancel(begun.id).status == "incomplete", "what has ended stays"
        long = api.responses.create(model="tiny", input="Hello", background=True)
        assert api.responses.cancel(long.id).status == "cancelled"
        assert api.responses.retrieve(long.id).status == "cancelled"
        gone = api.responses.create(model="tiny", input="Hello", background=True)
        api.responses.delete(gone.id)
        server.wait_idle()
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(gone.id)
        plain = api.responses.create(model="tiny", input="Hello", max_output_tokens=2)
        with pytest.raises(openai.BadRequestError, match="Only responses with"):
            api.responses.cancel(plain.id)


USER = {"role": "user", "content": "x"}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "is required"),
    ({"input": []}, "input", "is empty"),
    ({"input": ["x"]}, "input[0]", "must be an object"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "must be one of"),
    ({"input": [{"role": "user"}]}, "input[0].content", "is required"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content", "list of text parts"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "'input_image'"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "only message, function_call"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "is required"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content", "only the service"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"max_tokens": 5}, "max_tokens", "use 'max_output_tokens'"),
    ({"messages": [USER]}, "messages", "takes 'input'"),
    ({"truncation": "auto"}, "truncation", "items are not dropped"),
    ({"include": ["file_search_call.results"]}, "include", "can be included"),
    ({"background": True, "store": False}, "background", "needs"),
    ({"background": True, "stream": True}, "background", "cannot be had together"),
    ({"stream_options": {}}, "stream_options", "needs"),
    ({"conversation": "c"}, "conversation", "previous_response_id"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16"),
    ({"tools": ["x"]}, "tools[0]", "must be an object"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "only functions"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice.type", "'function'"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort", "has no effect"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "'medium'"),
    ({"colour": 1}, "colour", "Unknown field"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=[f"{i}-{bad[1]}" for i, bad in enumerate(BAD)])
def test_bad_requests_are_named(client: httpx.Client, fields: dict[str, Any], param: str, message: str) -> None:
    response = client.post("/v1/responses", json={"input": "x", "max_output_tokens": 1, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize("query", ["order=up", "limit=0", "limit=101", "limit=x", "after=none"])
def test_bad_pages_are_named(client: httpx.Client, query: str) -> None:
    name = client.post("/v1/responses", json={"input": "x", "max_output_tokens": 1}).json()["id"]
    response = client.get(f"/v1/responses/{name}/input_items?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.partition("=")[0]


def _stored(name: str, size: int = 0) -> StoredResponse:
    return StoredResponse({"id": name, "text": "x" * size}, [])


def test_the_store_is_bounded() -> None:
    store = ResponseStore(max_responses=3)
    for name in "abcd":
        store.put(_stored(name))
    assert (store.get("a"), len(store)) == (None, 3)
    store = ResponseStore(max_bytes=1000)
    for name in "abcd":
        store.put(_stored(name, 400))
    assert (store.get("a"), len(store)) == (None, 2)
    assert store.num_bytes <= 1000
    store.put(_stored("huge", 2000))
    assert len(store) == 0
    running = _stored("r")
    running.task = asyncio.new_event_loop().create_future()  # type: ignore[assignment]
    running.task.get_loop().close()  # type: ignore[union-attr]
    store = ResponseStore(max_responses=1)
    store.put(running)
    store.put(_stored("b"))
    assert store.get("r") is running, "what runs is not dropped"
