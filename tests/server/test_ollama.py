"""``/api`` with Ollama's own client, on every kind of engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import ollama
import pytest
from server_fakes import ServerThread, say

from cardan.server.ollama.prompts import fill_template

HELLO: Any = [{"role": "user", "content": "Hello"}]
GREEDY: Any = {"temperature": 0, "num_predict": 8}


OPENED: list[ollama.Client] = []


def ollama_of(server: ServerThread) -> ollama.Client:
    OPENED.append(ollama.Client(host=server.url, verify=False))
    return OPENED[-1]


@pytest.fixture(autouse=True)
def close_clients() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


@pytest.fixture(scope="module")
def shared_llama(shared_server: ServerThread) -> Iterator[ollama.Client]:
    with ollama.Client(host=shared_server.url, verify=False) as llama:
        yield llama


@pytest.fixture
def llama(server: ServerThread, shared_llama: ollama.Client) -> ollama.Client:
    return shared_llama


def lines_of(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    with client.stream("POST", path, json={"model": "tiny", **body}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.iter_lines()]


def test_models(llama: ollama.Client, client: httpx.Client, model: str) -> None:
    (listed,) = llama.list().models
    assert listed.model == model
    assert listed.details is not None
    assert isinstance(listed.modified_at, datetime)
    (loaded,) = llama.ps().models
    assert loaded.model == model
    assert loaded.context_length == client.get("/server_info").json()["context_length"]
    assert loaded.expires_at is not None
    shown = llama.show(model)
    assert shown.capabilities is not None
    assert "completion" in shown.capabilities
    assert shown.modelinfo
    assert llama.show(f"{model}:latest").details == shown.details
    assert client.get("/api/version").json() == {"version": client.get("/server_info").json()["version"]}
    assert client.get("/").text == "Ollama is running"
    assert client.head("/").status_code == 200


def test_what_is_known_of_the_model_is_told(start_fake: Any) -> None:
    server = start_fake()
    facts = {
        "family": "llama",
        "weight_bytes": 77,
        "num_parameters": 1_500_000_000,
        "num_layers": 3,
        "hidden_size": 64,
        "weight_formats": {"F32": 2, "Q4_1": 9},
    }
    server.engine.info = dataclasses.replace(server.engine.info, plan={"model": facts}, sampling_defaults={"top_k": 20})
    llama = ollama_of(server)
    details = llama.list().models[0].details
    assert details is not None
    assert (details.family, details.parameter_size, details.quantization_level) == ("llama", "1.50B", "Q4_1")
    assert llama.list().models[0].size == 77
    shown = llama.show("tiny")
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 4096
    assert shown.modelinfo["llama.block_count"] == 3
    assert shown.parameters == "top_k 20"


def test_chat(llama: ollama.Client, model: str) -> None:
    answer = llama.chat(model=model, messages=HELLO, options=GREEDY)
    assert answer.model == model
    assert answer.done is True
    assert answer.done_reason in ("length", "stop")
    assert answer.message.role == "assistant"
    assert answer.message.content
    assert answer.eval_count is not None
    assert 0 < answer.eval_count <= 8
    assert (answer.prompt_eval_count or 0) > 0
    assert (answer.total_duration or 0) > 0
    assert (answer.total_duration or 0) >= (answer.eval_duration or 0) + (answer.prompt_eval_duration or 0) - 2
    assert answer.created_at is not None
    assert datetime.fromisoformat(answer.created_at).tzinfo is not None


def test_chat_stream_equals_whole(llama: ollama.Client, model: str) -> None:
    whole = llama.chat(model=model, messages=HELLO, options=GREEDY)
    parts = list(llama.chat(model=model, messages=HELLO, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count
    assert parts[-1].done_reason == whole.done_reason
    assert all(part.eval_count is None for part in parts[:-1])


def test_generate_equals_the_chat_of_its_prompt(llama: ollama.Client, model: str) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, *HELLO]
    chat = llama.chat(model=model, messages=messages, options=GREEDY)
    asked: Any = {"model": model, "prompt": "Hello", "system": "Be brief.", "options": GREEDY}
    whole = llama.generate(**asked)
    assert whole.response == chat.message.content
    assert whole.prompt_eval_count == chat.prompt_eval_count
    parts = list(llama.generate(**asked, stream=True))
    assert "".join(part.response or "" for part in parts) == whole.response


def test_raw(llama: ollama.Client, client: httpx.Client, model: str) -> None:
    raw = llama.generate(model=model, prompt="Once upon", raw=True, options=GREEDY)
    native = client.post(
        "/generate", json={"text": "Once upon", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    ).json()
    assert raw.response == native["text"]
    assert raw.prompt_eval_count == native["meta_info"]["prompt_tokens"]


def test_async_client(server: ServerThread, model: str) -> None:
    async def ask() -> tuple[str, str]:
        async with ollama.AsyncClient(host=server.url, verify=False) as llama:
            whole = await llama.chat(model=model, messages=HELLO, options=GREEDY)
            stream = await llama.chat(model=model, messages=HELLO, options=GREEDY, stream=True)
            return whole.message.content or "", "".join([part.message.content or "" async for part in stream])

    whole, streamed = asyncio.run(ask())
    assert whole == streamed != ""


def test_logprobs(llama: ollama.Client, model: str) -> None:
    whole = llama.chat(model=model, messages=HELLO, options=GREEDY, logprobs=True, top_logprobs=2)
    assert whole.logprobs is not None
    assert len(whole.logprobs) == whole.eval_count
    assert all(len(entry.top_logprobs or ()) == 2 and entry.logprob <= 0 for entry in whole.logprobs)
    parts = llama.chat(model=model, messages=HELLO, options=GREEDY, logprobs=True, stream=True)
    assert [entry.token for part in parts for entry in part.logprobs or ()] == [e.token for e in whole.logprobs]


def test_an_empty_prompt_only_loads(llama: ollama.Client, client: httpx.Client, model: str) -> None:
    assert llama.generate(model=model, prompt="", keep_alive="5m").done_reason == "load"
    assert llama.chat(model=model, messages=[]).done_reason == "load"
    (line,) = lines_of(client, "/api/generate", model=model, keep_alive=-1)
    assert (line["done"], line["response"]) == (True, "")


def test_options_reach_the_engine(start_fake: Any) -> None:
    server = start_fake()
    options = {
        "num_predict": 7,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["zz", "yy"],
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_ctx": 4096,
        "num_keep": 4,
        "repeat_last_n": -1,
        "mirostat": 0,
    }
    for ask in (
        {"prompt": "x"},
        {"prompt": "x", "raw": True},
        {"prompt": "x", "template": "{{ .Prompt }}"},
    ):
        assert server.http.post("/api/generate", json={"model": "tiny", "options": options, **ask}).status_code == 200
        sampling = server.engine.seen[-1].sampling
        assert (sampling.max_new_tokens, sampling.temperature, sampling.top_k) == (7, 0.5, 5)
        assert (sampling.top_p, sampling.min_p, sampling.seed, sampling.stop) == (0.9, 0.1, 3, ("zz", "yy"))
        assert sampling.repetition_penalty == 1.2
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert server.http.post(
        "/api/chat",
        json={"model": "tiny", "messages": HELLO, "options": {"top_k": 0, "num_predict": -1}, "stream": False},
    ).json()["eval_count"]
    seen = server.engine.seen[-1]
    assert seen.sampling.top_k == -1
    assert seen.sampling.max_new_tokens == 4096 - len(seen.input_ids) - 1


def test_num_ctx_bounds_prompt_and_answer(start_fake: Any) -> None:
    server = start_fake()
    llama = ollama_of(server)
    full = llama.generate(model="tiny", prompt="x" * 40, raw=True, options={"num_ctx": 50})
    assert (full.eval_count, full.done_reason) == (10, "length")
    with pytest.raises(ollama.ResponseError, match="leaves no room for an answer"):
        llama.generate(model="tiny", prompt="x" * 40, raw=True, options={"num_ctx": 40})
    chat = llama.chat(model="tiny", messages=HELLO, options={"num_ctx": 100})
    assert (chat.prompt_eval_count or 0) + (chat.eval_count or 0) == 100


def _prompt_of(server: ServerThread) -> str:
    return str(server.engine.tokenizer.decode(server.engine.seen[-1].input_ids, skip_special_tokens=False))


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{{ .Prompt }}", "P"),
        ("{{.System}}|{{- .Prompt -}}|{{ .Response }} end", "S|P|"),
        ("{{ .Prompt }}{{", "P{{"),
        ("no places", "no places"),
    ],
)
def test_templates(start_fake: Any, template: str, prompt: str) -> None:
    server = start_fake()
    body = {"model": "tiny", "prompt": "P", "system": "S", "template": template, "stream": False}
    assert server.http.post("/api/generate", json={**body, "options": {"num_predict": 1}}).status_code == 200
    assert _prompt_of(server) == prompt


def test_a_template_of_brackets_costs_no_more_than_its_length() -> None:
    started_s = time.monotonic()
    assert fill_template("{{" * 500_000, "P", "S") == "{{" * 500_000
    assert fill_template("{{.Prompt}}" * 50_000 + "{{", "P", "S") == "P" * 50_000 + "{{"
    assert time.monotonic() - started_s < 5


def test_the_last_message_of_the_assistant_is_continued(start_fake: Any) -> None:
    server = start_fake()
    messages = [*HELLO, {"role": "assistant", "content": "Once"}]
    ollama_of(server).chat(model="tiny", messages=messages, options=GREEDY)
    assert _prompt_of(server).endswith("<|im_start|>assistant\nOnce")


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"model": None}, "'model' is required"),
    ("chat", {"model": ""}, "at least 1 character, got ''"),
    ("chat", {"messages": "x"}, "'messages' should be a valid list"),
    ("chat", {"messages": ["x"]}, "'messages[0]' must be an object"),
    ("chat", {"messages": [{"content": "x"}]}, "'messages[0].role' is required"),
    ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "'messages[0].role' is 'robot'"),
    ("chat", {"messages": [{"role": "user", "content": "x", "images": ["eA=="]}]}, "only text is taken"),
    ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "no call in an earlier message"),
    ("chat", {"messages": [{"role": "tool", "content": "x", "tool_name": "f"}]}, "no call of 'f' in an earlier"),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "must be an object with a 'function'"),
    ("chat", {"prompt": "x"}, "/api/generate takes 'prompt'"),
    ("chat", {"messages": HELLO, "tools": [{"type": "function"}]}, "'tools[0].function' is required"),
    ("chat", {"truncate": True}, "send what fits"),
    ("generate", {"messages": HELLO}, "/api/chat takes 'messages'"),
    ("generate", {"prompt": "x", "suffix": "y"}, "filling in the middle is not available"),
    ("generate", {"prompt": "x", "images": ["eA=="]}, "only text is taken"),
    ("generate", {"prompt": "x", "context": [1, 2]}, "send the conversation to /api/chat"),
    ("generate", {"prompt": "x", "width": 5}, "only text is made"),
    ("generate", {"prompt": "x", "raw": True, "system": "y"}, "without 'system' and 'template'"),
    ("generate", {"prompt": "x", "raw": True, "format": "json"}, "'format' works with the model's own chat template"),
    ("generate", {"prompt": "x", "raw": True, "think": True}, "'think' works with the model's own chat template"),
    ("generate", {"prompt": "x", "raw": True, "top_logprobs": 2}, "'top_logprobs' has no effect"),
    ("generate", {"prompt": "x", "template": "{{ if .System }}"}, "'template' has '{{ if .System }}' in it"),
    ("generate", {"prompt": "x", "template": "{{ .Suffix }}"}, "'template' has '{{ .Suffix }}' in it"),
    ("generate", {"prompt": "x", "format": "xml"}, "'format' must be 'json' or a JSON schema"),
    ("generate", {"prompt": "x", "think": "much"}, "'think' must be true, false, 'low'"),
    ("generate", {"prompt": "x", "promt": "x"}, "Did you mean 'prompt'"),
    ("generate", {"prompt": "x", "options": {"num_predict": 0}}, "'options.num_predict' must be at least 1"),
    ("generate", {"prompt": "x", "options": {"num_predict": -3}}, "'options.num_predict' should be greater"),
    ("generate", {"prompt": "x", "options": {"num_ctx": 10**6}}, "serves a context of"),
    ("generate", {"prompt": "x", "options": {"num_gpu": 1}}, "decided when the server was started"),
    ("generate", {"prompt": "x", "options": {"repeat_last_n": 64}}, "penalties look at the whole sequence"),
    ("generate", {"prompt": "x", "options": {"mirostat": 2}}, "mirostat is not available"),
    ("generate", {"prompt": "x", "options": {"top_k": -2}}, "'options.top_k' must be a whole number from -1 on"),
    ("generate", {"prompt": "x", "options": {"heat": 1}}, "Unknown field 'options.heat'"),
    ("show", {"model": None}, "'model' is required"),
]


@pytest.mark.parametrize(("route", "fields", "message"), BAD, ids=[f"{i}-{bad[0]}" for i, bad in enumerate(BAD)])
def test_bad_requests_are_named(
    client: httpx.Client, model: str, route: str, fields: dict[str, Any], message: str
) -> None:
    response = client.post(f"/api/{route}", json={"model": model, **fields})
    assert response.status_code == 400, response.text
    told = response.json()
    assert list(told) == ["error"]
    assert message in told["error"]


def test_errors_of_the_client(start_fake: Any) -> None:
    server = start_fake()
    llama = ollama_of(server)
    with pytest.raises(ollama.ResponseError, match="does not exist here") as missing:
        llama.chat(model="llama3", messages=HELLO)
    assert missing.value.status_code == 404
    nan: Any = {"model": "tiny", "messages": [{"role": "user", "content": "[nan]"}]}
    with pytest.raises(ollama.ResponseError, match="The logits hold NaN"):
        llama.chat(**nan)
    with pytest.raises(ollama.ResponseError, match="The logits hold NaN"):
        list(llama.chat(**nan, stream=True))
    assert "There is no route '/api/pull'" in server.http.post("/api/pull", json={}).json()["error"]


PARIS = '<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call>'


def look(city: str) -> str:
    """Looks.

    Args:
        city: where.
    """
    return city


def asking(text: str) -> Any:
    return [{"role": "user", "content": say(text)}]


def test_thinking_and_calls(tool_server: ServerThread) -> None:
    llama = ollama_of(tool_server)
    assert {"tools", "thinking"} <= set(llama.show("tiny").capabilities or ())
    asked: Any = {"model": "tiny", "messages": asking(f"<think>Hm.</think>See.\n{PARIS}"), "tools": [look]}
    whole = llama.chat(**asked)
    assert (whole.message.thinking, whole.message.content) == ("Hm.", "See.")
    (call,) = whole.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("look", {"city": "Paris"})
    assert whole.done_reason == "stop"
    parts = list(llama.chat(**asked, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "Hm."
    assert "".join(part.message.content or "" for part in parts) == "See."
    (streamed,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert streamed == call
    quiet = llama.chat(**asked, think=False)
    assert (quiet.message.thinking, quiet.message.content) == (None, "See.")
    assert llama.generate(model="tiny", prompt=say("<think>Hm.</think>Yes.")).thinking == "Hm."


def test_calls_and_results_in_the_history(tool_server: ServerThread) -> None:
    call = {"function": {"name": "look", "arguments": {"city": "Paris"}}}
    other = {"function": {"name": "listen", "arguments": {}}}
    messages: Any = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "thinking": "Hm.", "tool_calls": [call, other]},
        {"role": "tool", "tool_name": "listen", "content": "quiet"},
        {"role": "tool", "content": "rain"},
        *asking("It rains."),
    ]
    answer = ollama_of(tool_server).chat(model="tiny", messages=messages, tools=[look])
    assert answer.message.content == "It rains."
    seen = tool_server.engine.tokenizer.rendered["messages"]
    ids = [call["id"] for call in seen[1]["tool_calls"]]
    assert len(set(ids)) == 2
    assert [message["tool_call_id"] for message in seen[2:4]] == ids[::-1]
    assert seen[1]["reasoning_content"] == "Hm."


def test_think_needs_a_model_that_thinks(start_fake: Any) -> None:
    server = start_fake()
    llama = ollama_of(server)
    for think in (True, "high"):
        with pytest.raises(ollama.ResponseError, match="'think' has no effect"):
            llama.chat(model="tiny", messages=HELLO, think=think)  # type: ignore[arg-type]
    server.engine.tokenizer.variables = frozenset({"enable_thinking"})
    llama.chat(model="tiny", messages=HELLO, think="high", options=GREEDY)
    assert server.engine.tokenizer.rendered["enable_thinking"] is True
    llama.chat(model="tiny", messages=HELLO, think=False, options=GREEDY)
    assert server.engine.tokenizer.rendered["enable_thinking"] is False
