"""Hidden states in answers, and prompts of vectors, over HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import openai

from cardan.config import EngineConfig
from cardan.server.watching.crash_dump import sendable

GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


def test_the_native_form(client: httpx.Client) -> None:
    asked: dict[str, Any] = {"input_ids": [5, 6, 7], "sampling_params": GREEDY}
    assert "hidden_states" not in client.post("/generate", json=asked).json()["meta_info"]
    asked["return_hidden_states"] = True
    prompt, *decoded = client.post("/generate", json=asked).json()["meta_info"]["hidden_states"]
    assert len(prompt) == 3
    assert len(decoded) == 4 - 1
    assert {len(vector) for vector in (*prompt, *decoded)} == {len(prompt[0])}
    streamed = client.post("/generate", json={**asked, "stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in streamed if "{" in line]
    assert np.allclose(events[-1]["meta_info"]["hidden_states"][0], prompt, atol=1e-6)
    assert all("hidden_states" not in event["meta_info"] for event in events[:-1])
    both = client.post(
        "/generate", json={**asked, "input_ids": [[5], [6]], "return_hidden_states": [True, False]}
    ).json()
    assert ["hidden_states" in answer["meta_info"] for answer in both] == [True, False]
    refused = client.post("/generate", json={**asked, "return_hidden_states": "yes"})
    assert refused.status_code == 400
    assert "return_hidden_states must be of type bool" in refused.json()["error"]["message"]


def test_openai_shows_the_last_one(api: openai.OpenAI, client: httpx.Client, model: str) -> None:
    native = client.post(
        "/generate",
        json={"text": "Hello", "sampling_params": GREEDY, "return_hidden_states": True},
    ).json()["meta_info"]["hidden_states"]
    extra = {"return_hidden_states": True, "ignore_eos": True}
    asked: Any = {"model": model, "prompt": "Hello", "temperature": 0, "max_tokens": 4, "extra_body": extra}
    whole: Any = api.completions.create(**asked).choices[0]
    assert np.allclose(whole.hidden_states, native[-1], atol=1e-6)
    chunks = list(api.completions.create(**asked, stream=True))
    assert np.allclose(chunks[-1].choices[0].model_extra["hidden_states"], native[-1], atol=1e-6)
    chat: Any = {"model": model, "temperature": 0, "max_tokens": 4, "extra_body": extra}
    chat["messages"] = [{"role": "user", "content": "Hello"}]
    vector = api.chat.completions.create(**chat).choices[0].model_extra["hidden_states"]
    assert len(vector) == len(native[-1])
    last = list(api.chat.completions.create(**chat, stream=True))[-1].choices[0]
    assert np.allclose(last.delta.model_extra["hidden_states"], vector, atol=1e-6)
    del chat["extra_body"]
    assert "hidden_states" not in api.chat.completions.create(**chat).choices[0].model_extra


def test_vectors_instead_of_ids(client: httpx.Client) -> None:
    width = client.get("/server_info").json()["hidden_size"]
    first, second = [[0.5] * width] * 3, [[-0.25] * width] * 2
    asked: dict[str, Any] = {"sampling_params": GREEDY}
    one = client.post("/generate", json={**asked, "input_embeds": first}).json()
    assert one["meta_info"]["prompt_tokens"] == 3
    assert one["meta_info"]["cached_tokens"] == 0
    many = client.post("/generate", json={**asked, "input_embeds": [first, second]}).json()
    assert many[0]["output_ids"] == one["output_ids"]
    assert many[1]["meta_info"]["prompt_tokens"] == 2
    for wrong, message in (
        ([[0.5] * (width - 1)], f"[tokens, {width}]"),
        ([[0.5], [0.5, 1]], "theirs differ"),
        ([[1e39] * width], "finite float32"),
        ([["a"] * width], "at least one vector of numbers"),
        ({}, "at least one vector of numbers"),
        ([[[]]], "at least one vector of numbers"),
    ):
        refused = client.post("/generate", json={**asked, "input_embeds": wrong})
        assert refused.status_code == 400, wrong
        assert refused.json()["error"]["param"] == "input_embeds"
        assert message in refused.json()["error"]["message"]
    both = client.post("/generate", json={**asked, "text": "x", "input_embeds": first})
    assert both.status_code == 400
    assert "Pass one of a text, input_ids and input_embeds" in both.json()["error"]["message"]


def test_a_dump_holds_what_asks_for_them_again() -> None:
    from cardan.engine.api import GenerateRequest

    vectors = np.array([[0.5, -1.0]], np.float32)
    tokenizer: Any = None
    path, body = sendable(GenerateRequest(input_embeds=vectors, hidden_states=True), tokenizer)
    assert path == "/generate"
    assert body["input_embeds"] == [[0.5, -1.0]]
    assert body["return_hidden_states"] is True
    assert not {"text", "input_ids"} & body.keys()


def test_it_is_off_by_default() -> None:
    assert EngineConfig().scheduler.enable_return_hidden_states is False
