"""``/v1/completions`` with OpenAI's own client, on every kind of engine."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

IGNORE_EOS = {"ignore_eos": True}


def test_completion(api: openai.OpenAI, model: str) -> None:
    answer = api.completions.create(model=model, prompt="Once", max_tokens=5, temperature=0, extra_body=IGNORE_EOS)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_default_is_sixteen_tokens(api: openai.OpenAI, model: str) -> None:
    answer = api.completions.create(model=model, prompt="Once", extra_body=IGNORE_EOS)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_all_forms_of_prompts(api: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "max_tokens": 5, "temperature": 0, "extra_body": IGNORE_EOS}
    one, two = [79, 110], [99, 101, 33]
    alone = [api.completions.create(prompt=prompt, **asked).choices[0].text for prompt in (one, two)]
    together = api.completions.create(prompt=[one, two], **asked)
    assert [choice.text for choice in together.choices] == alone
    assert [choice.index for choice in together.choices] == [0, 1]
    assert together.usage is not None
    assert together.usage.completion_tokens == 10
    many = api.completions.create(prompt=["a", "b"], **{**asked, "temperature": 1, "n": 2})
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]


def test_stream_equals_whole(api: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": ["a", "bc"], "max_tokens": 6, "temperature": 0, "extra_body": IGNORE_EOS}
    whole = api.completions.create(**asked)
    texts, ended, usage = ["", ""], [], None
    for chunk in api.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        if not chunk.choices:
            usage = chunk.usage
            continue
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        ended += [choice.index] if choice.finish_reason else []
    assert texts == [choice.text for choice in whole.choices]
    assert sorted(ended) == [0, 1]
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 12)


def test_usage_in_every_chunk(api: openai.OpenAI, model: str) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = api.completions.create(model=model, prompt="a", max_tokens=5, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens if chunk.usage else None for chunk in stream]
    assert None not in counts
    assert counts == sorted(counts, key=lambda count: count or 0)
    assert counts[-1] == counts[-2]


def test_logprobs(api: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": "Once", "max_tokens": 5, "temperature": 0, "extra_body": IGNORE_EOS}
    choice = api.completions.create(**asked, logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 5
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
    assert logprobs.text_offset[0] == 0
    plain = api.completions.create(**asked, logprobs=0).choices[0].logprobs
    assert plain is not None
    assert plain.top_logprobs is None
    streamed: list[str] = []
    offsets: list[int] = []
    for chunk in api.completions.create(**asked, logprobs=1, stream=True):
        part = chunk.choices[0].logprobs
        if part is not None:
            streamed += part.tokens or []
            offsets += part.text_offset or []
    assert streamed == logprobs.tokens
    assert len(offsets) == 5


def test_echo_with_prompt_logprobs(api: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": "Once", "echo": True, "temperature": 0, "extra_body": IGNORE_EOS}
    choice = api.completions.create(**asked, max_tokens=3, logprobs=1).choices[0]
    assert choice.text.startswith("Once")
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens).startswith("Once")
    assert logprobs.token_logprobs[0] is None
    assert all(value is not None for value in logprobs.token_logprobs[1:])
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if "\ufffd" not in token and offset + len(token) <= len(choice.text):
            assert choice.text[offset : offset + len(token)] == token
    streamed, tokens = "", 0
    for chunk in api.completions.create(**asked, max_tokens=3, logprobs=1, stream=True):
        streamed += chunk.choices[0].text
        part = chunk.choices[0].logprobs
        tokens += len((part.tokens if part else None) or [])
    assert streamed == choice.text
    assert tokens == len(logprobs.tokens)


def test_echo_alone_scores_the_prompt(api: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": "Once", "echo": True, "max_tokens": 0, "logprobs": 1}
    answer = api.completions.create(**asked)
    choice = answer.choices[0]
    assert choice.text == "Once"
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == "Once"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    streamed = "".join(chunk.choices[0].text for chunk in api.completions.create(**asked, stream=True))
    assert streamed == "Once"


def test_echo_of_ids(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": "On", "add_special_tokens": False}).json()["tokens"]
    body = {"prompt": ids, "echo": True, "max_tokens": 1}
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"].startswith("On")


def test_offsets_count_characters(start_fake: Any) -> None:
    """Tokens that are parts of a character share its offset; the next one comes behind it."""
    server = start_fake()
    with server.client() as client:
        body = {"prompt": "[accent]", "max_tokens": 9, "logprobs": 0}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == "aé€xyz"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 4, 5]


def test_special_tokens_take_no_room(start_fake: Any) -> None:
    server = start_fake()
    with server.client() as client:
        body = {"prompt": "[eos]", "logprobs": 0, "max_tokens": 9}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"][3] == "<|endoftext|>"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_ids_of_several_prompts(start_fake: Any) -> None:
    server = start_fake()
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": ["a", "b"], "rid": "mine"}).json()
    assert answer["id"] == "mine"
    assert {request.rid for request in server.engine.seen} == {"mine-0", "mine-1"}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "is required"),
    ({"prompt": 5}, "prompt", "must be a string"),
    ({"prompt": []}, "prompt", "must be a string"),
    ({"prompt": ["a", 1]}, "prompt", "list of token ids"),
    ({"prompt": [[1], "a"]}, "prompt", "list of token ids"),
    ({"prompt": ""}, "text", "no tokens"),
    ({"prompt": [[]]}, "input_ids", "no tokens"),
    ({"prompt": [10**9]}, "prompt", "ids of this model"),
    ({"prompt": [-3]}, "prompt", "ids of this model"),
    ({"prompt": ["x"] * 1025}, "prompt", "at most 1024"),
    ({"max_tokens": 0}, "max_tokens", '"echo": true'),
    ({"best_of": 3}, "best_of", "not ranked"),
    ({"suffix": "end"}, "suffix", "filling in the middle"),
    ({"messages": []}, "messages", "takes 'prompt'"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "use 'max_tokens'"),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"top_logprobs": 2}, "top_logprobs", "number of alternatives"),
    ({"guided_json": 5}, "guided_json", "must be an object"),
    ({"guided_choice": []}, "guided_choice", "at least one text"),
    ({"guided_choice": ["a"], "regex": "b"}, "guided_choice", "at most one of them"),
    ({"echo": 1}, "echo", "valid boolean"),
    ({"modell": "x"}, "modell", "Did you mean 'model'"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=[f"{i}-{bad[1]}" for i, bad in enumerate(BAD)])
def test_bad_requests_are_named(client: httpx.Client, fields: dict[str, Any], param: str, message: str) -> None:
    response = client.post("/v1/completions", json={"prompt": "x", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == param
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_suffix_and_best_of_that_ask_for_nothing(client: httpx.Client) -> None:
    body = {"prompt": "x", "suffix": None, "best_of": 1, "max_tokens": 1, "user": "me"}
    assert client.post("/v1/completions", json=body).status_code == 200
