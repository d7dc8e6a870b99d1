"""``/v1/chat/completions`` with OpenAI's own client, on every kind of engine."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx
import openai
import pytest
from server_fakes import ServerThread

from cardan.types import SamplingParams

HELLO: Any = [{"role": "user", "content": "Hello"}]


IGNORE_EOS = {"ignore_eos": True}


def test_chat(api: openai.OpenAI, model: str) -> None:
    answer = api.chat.completions.create(
        model=model, messages=HELLO, max_tokens=6, temperature=0, extra_body=IGNORE_EOS
    )
    assert answer.object == "chat.completion"
    assert answer.model == model
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens == 6
    assert usage.total_tokens == usage.prompt_tokens + 6
    assert usage.prompt_tokens_details is not None


def test_cached_tokens_are_reported(api: openai.OpenAI, model: str) -> None:
    messages: Any = [{"role": "user", "content": "Say this twice, please"}]
    for _ in range(2):
        answer = api.chat.completions.create(model=model, messages=messages, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1


def test_stream_equals_whole(api: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": HELLO, "max_tokens": 8, "temperature": 0, "extra_body": IGNORE_EOS}
    whole = api.chat.completions.create(**asked)
    chunks = list(api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chunk.created for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_without_usage(api: openai.OpenAI, model: str) -> None:
    chunks = list(api.chat.completions.create(model=model, messages=HELLO, max_tokens=2, stream=True))
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)


def test_logprobs(api: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": HELLO, "max_tokens": 4, "temperature": 0, "extra_body": IGNORE_EOS}
    whole = api.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for entry in logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.bytes is not None
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
        assert [other.logprob for other in entry.top_logprobs] == sorted(
            (other.logprob for other in entry.top_logprobs), reverse=True
        )
    streamed = []
    for chunk in api.chat.completions.create(**asked, logprobs=True, stream=True):
        if chunk.choices[0].logprobs:
            streamed.extend(chunk.choices[0].logprobs.content or [])
    assert [entry.token for entry in streamed] == [entry.token for entry in logprobs.content]
    assert all(math.isclose(a.logprob, b.logprob) for a, b in zip(streamed, logprobs.content, strict=True))


def test_three_choices(api: openai.OpenAI, model: str) -> None:
    answer = api.chat.completions.create(model=model, messages=HELLO, n=3, max_tokens=8, extra_body=IGNORE_EOS)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    ended, roles = [], []
    for chunk in api.chat.completions.create(
        model=model, messages=HELLO, n=3, max_tokens=8, stream=True, extra_body=IGNORE_EOS
    ):
        choice = chunk.choices[0]
        roles += [choice.index] if choice.delta.role else []
        ended += [choice.index] if choice.finish_reason else []
    assert sorted(ended) == sorted(roles) == [0, 1, 2]


def test_seed(api: openai.OpenAI, model: str) -> None:
    def ask(seed: int) -> str | None:
        asked: Any = {"model": model, "messages": HELLO, "max_tokens": 12, "extra_body": IGNORE_EOS}
        return api.chat.completions.create(**asked, seed=seed).choices[0].message.content

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in range(5)}) > 1


@pytest.mark.parametrize("as_list", [False, True])
def test_stop(api: openai.OpenAI, model: str, as_list: bool) -> None:
    asked: Any = {"model": model, "messages": HELLO, "max_tokens": 48, "seed": 3, "extra_body": IGNORE_EOS}
    text = api.chat.completions.create(**asked).choices[0].message.content or ""
    stop = next(character for character in reversed(text) if character != "\ufffd")
    stopped = api.chat.completions.create(**asked, stop=[stop, "never!"] if as_list else stop).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == text[: text.index(stop)]
    assert stopped.model_extra is not None
    assert stopped.model_extra["matched_stop"] == stop
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in api.chat.completions.create(**asked, stop=stop, stream=True)
    )
    assert streamed == stopped.message.content


def test_async_client(server: ServerThread, model: str) -> None:
    async def ask_many() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=False),
        ) as api:

            async def ask(number: int) -> str:
                stream = await api.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": f"number {number}"}],
                    max_tokens=5,
                    stream=True,
                    extra_body=IGNORE_EOS,
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(ask(number) for number in range(16)))

    assert len(asyncio.run(ask_many())) == 16


def test_missing_or_empty_model_means_the_served_one(client: httpx.Client) -> None:
    for body in ({}, {"model": ""}, {"model": None}):
        response = client.post("/v1/chat/completions", json={**body, "messages": HELLO, "max_tokens": 1})
        assert response.status_code == 200, response.text


def test_typed_errors(api: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist here") as missing:
        api.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="less than or equal to 2") as wrong:
        api.chat.completions.create(model=model, messages=HELLO, presence_penalty=3)
    assert wrong.value.param == "presence_penalty"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("gpt-4o")
    assert api.models.retrieve(model).id == model


def test_model_ids_with_slashes(start_fake: Any) -> None:
    server = start_fake()
    with server.client() as client:
        response = client.get("/v1/models/meta/llama")
    assert response.status_code == 404
    assert "'meta/llama' does not exist" in response.json()["error"]["message"]


ONE = {"role": "user", "content": "x"}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "is required"),
    ({"messages": []}, "messages", "is empty"),
    ({"messages": "hi"}, "messages", "valid list"),
    ({"messages": ["hi"]}, "messages[0]", "must be an object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "is required"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "must be one of"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "answers the call with this id"),
    ({"messages": [{**ONE, "tool_call_id": "1"}]}, "messages[0].tool_call_id", "only those of role 'tool'"),
    ({"messages": [{**ONE, "reasoning_content": "x"}]}, "messages[0].reasoning_content", "role 'assistant'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a string"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be a string"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "must be a string"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]", "only parts of type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].image_url",
        "only text",
    ),
    ({"messages": [{**ONE, "colour": 1}]}, "messages[0].colour", "Unknown field"),
    ({"messages": [{**ONE, "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls", "role 'assistant'"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "--tool-call-parser"),
    ({"tool_choice": "required"}, "tool_choice", "no 'tools'"),
    ({"functions": [{"name": "f"}]}, "functions", "'tools'"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_object, json_schema or structural_tag"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema", "'schema'"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex", "at most one of them"),
    ({"modalities": ["text", "audio"]}, "modalities", "only text"),
    ({"audio": {"voice": "x"}}, "audio", "only text"),
    ({"prediction": {"type": "content"}}, "prediction", "predicted"),
    ({"web_search_options": {}}, "web_search_options", "search the web"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "reads no such variable"),
    ({"reasoning_effort": "much"}, "reasoning_effort", "must be one of none, minimal"),
    ({"reasoning": {"effort": "low"}}, "reasoning", "'reasoning_effort'"),
    ({"service_tier": "flex"}, "service_tier", "one tier"),
    ({"store": True}, "store", "not kept"),
    ({"prompt": "x"}, "prompt", "takes 'messages'"),
    ({"max_new_tokens": 4}, "max_new_tokens", "max_completion_tokens"),
    ({"max_token": 4}, "max_token", "Did you mean 'max_tokens'"),
    ({"temperature": "hot"}, "temperature", "valid number, got 'hot'"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_k": 0}, "top_k", "-1 for the whole vocabulary"),
    ({"top_k": 1.5}, "top_k", "whole number"),
    ({"min_p": 2}, "min_p", "less than or equal to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 10**30}, "n", "n"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -5}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "mean the same"),
    ({"min_tokens": 4, "min_new_tokens": 5}, "min_tokens", "mean the same"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_new_tokens", "more than the 4"),
    ({"logprobs": 3}, "logprobs", "valid boolean"),
    ({"top_logprobs": 3}, "top_logprobs", "no effect"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": ""}, "stop", "empty string"),
    ({"stop": [1]}, "stop", "list of strings"),
    ({"stop": "x" * 2000}, "stop", "at most 1024"),
    ({"stop_token_ids": [10**7]}, "stop_token_ids", "ids of this model"),
    ({"stop_token_ids": "5"}, "stop_token_ids", "list of token ids"),
    ({"stop_regex": "("}, "stop_regex", "stop_regex"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "got the key 'x'"),
    ({"logit_bias": {"1": 2, "01": 3}}, "logit_bias", "got the key '01'"),
    ({"logit_bias": {"1": 2, " 1": 3}}, "logit_bias", "got the key ' 1'"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
    ({"stop_token_ids": ["no"] * 1025}, "stop_token_ids", "at most 1024 token ids, got 1025"),
    ({"messages": [5] * 16385}, "messages", "at most 16384 messages and parts of messages, got more than 16384"),
    (
        {"messages": [{"role": "user", "content": [5] * 16384}]},
        "messages",
        "and parts of messages, got more than 16384",
    ),
    ({"logit_bias": {"99999999": 1}}, "logit_bias", "ids of this model"),
    ({"logit_bias": [1]}, "logit_bias", "must be an object"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
    ({"seed": 2**70}, "seed", "64-bit"),
    ({"seed": 1.5}, "seed", "64-bit"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "Unknown field"),
    ({"stream": True, "stream_options": 1}, "stream_options", "valid dictionary"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "include_usage",
    ),
    ({"stream": "true"}, "stream", "valid boolean"),
    ({"model": 5}, "model", "valid string"),
    ({"continue_final_message": True}, "continue_final_message", "of the assistant"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not set 'messages'"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs", "must be an object"),
    ({"priority": 3}, "priority", "--enable-priority-scheduling"),
    ({"rid": ""}, "rid", "at least 1 character"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=[f"{i}-{bad[1]}" for i, bad in enumerate(BAD)])
def test_bad_requests_are_named(client: httpx.Client, fields: dict[str, Any], param: str, message: str) -> None:
    response = client.post("/v1/chat/completions", json={"messages": [ONE], **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert client.post("/v1/chat/completions", json={"messages": [ONE], "max_tokens": 1}).status_code == 200


def test_fields_that_ask_for_nothing(client: httpx.Client) -> None:
    nothing = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "stop": None,
        "suffix_of_null": None,
    }
    nothing.pop("suffix_of_null")
    response = client.post("/v1/chat/completions", json={"messages": [ONE], "max_tokens": 1, **nothing})
    assert response.status_code == 200, response.text


def test_echoed_assistant_message_is_taken_back(api: openai.OpenAI, model: str) -> None:
    """A client may send back the message it got, null fields and all."""
    answer = api.chat.completions.create(model=model, messages=HELLO, max_tokens=2)
    again: Any = [*HELLO, answer.choices[0].message.model_dump(), ONE]
    assert api.chat.completions.create(model=model, messages=again, max_tokens=2).choices


def test_fields_reach_the_engine(start_fake: Any) -> None:
    server = start_fake()
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"65": 2, "66": -100},
        "seed": -3,
        "stop": "zzz",
        "stop_regex": ["z{9}"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "n": 2,
        "max_completion_tokens": 7,
        "min_tokens": 2,
        "rid": "mine",
        "cache_salt": "salt",
    }
    with server.client() as client:
        response = client.post("/v1/chat/completions", json={"messages": [ONE], **fields})
        assert response.status_code == 200, response.text
    seen = server.engine.seen[-1]
    assert response.json()["id"] == seen.rid == "mine"
    assert seen.cache_salt == "salt"
    assert seen.add_special_tokens is False
    assert seen.sampling == SamplingParams(
        max_new_tokens=7,
        min_new_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={65: 2.0, 66: -100.0},
        seed=-3,
        stop=("zzz",),
        stop_regex=("z{9}",),
        stop_token_ids=(3,),
        ignore_eos=True,
        no_stop_trim=True,
        skip_special_tokens=False,
        n=2,
    )


def _prompt_of(server: ServerThread) -> str:
    seen = server.engine.seen[-1]
    return server.engine.tokenizer.decode(seen.input_ids, skip_special_tokens=False)


def test_messages_become_the_prompt(start_fake: Any) -> None:
    server = start_fake()
    system = {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"),
        (
            {"chat_template_kwargs": {"prefix": "P"}},
            "P<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n",
        ),
    ]
    with server.client() as client:
        for fields, prompt in cases:
            body = {"messages": [system, ONE], "max_tokens": 1, **fields}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
            assert _prompt_of(server) == prompt
        start = {"role": "assistant", "content": "Once"}
        body = {"messages": [ONE, start], "max_tokens": 1, "continue_final_message": True}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert _prompt_of(server) == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nOnce"
        body["add_generation_prompt"] = True
        assert "contradict" in client.post("/v1/chat/completions", json=body).json()["error"]["message"]


def test_long_chats_are_rendered_too(start_fake: Any) -> None:
    server = start_fake()
    body = {"messages": [{"role": "user", "content": "x" * 4080}], "max_tokens": 1}
    with server.client() as client:
        response = client.post("/v1/chat/completions", json=body)
        assert response.json()["error"]["code"] == "context_length_exceeded"


def test_no_limit_means_what_the_context_leaves(start_fake: Any) -> None:
    server = start_fake()
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "[eos]"}]}).json()
    seen = server.engine.seen[-1]
    assert seen.sampling.max_new_tokens == 4096 - len(seen.input_ids) - 1
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["matched_stop"] == 256
    assert len(answer["choices"][0]["message"]["content"]) == 3


def test_no_chat_template(start_fake: Any) -> None:
    server = start_fake()
    server.engine.tokenizer.has_chat_template = False
    with server.client() as client:
        response = client.post("/v1/chat/completions", json={"messages": [ONE]})
    assert response.status_code == 400
    assert "no chat template. Use completions" in response.json()["error"]["message"]


def test_failed_choice(start_fake: Any) -> None:
    server = start_fake()
    messages: Any = [{"role": "user", "content": "[nan]"}]
    with server.openai() as api:
        with pytest.raises(openai.InternalServerError, match="The logits hold NaN"):
            api.chat.completions.create(model="tiny", messages=messages)
        with pytest.raises(openai.APIError, match="The logits hold NaN"):
            list(api.chat.completions.create(model="tiny", messages=messages, stream=True))


def test_no_cache_report(start_fake: Any) -> None:
    server = start_fake(enable_cache_report=False)
    with server.client() as client:
        usage = client.post("/v1/chat/completions", json={"messages": [ONE], "max_tokens": 1}).json()["usage"]
    assert "prompt_tokens_details" not in usage
