"""``/generate``: results, lists, streams, logprobs, ids; on every kind of engine."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import httpx
import pytest

from cardan.config import SchedulerConfig


def generate(client: httpx.Client, **body: Any) -> Any:
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    events = []
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line:
                assert line.startswith("data: ")
                events.append(line.removeprefix("data: "))
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def test_defaults_of_the_model_stand_for_what_is_not_sent(start_fake: Any) -> None:
    server = start_fake()
    server.engine.info = dataclasses.replace(server.engine.info, sampling_defaults={"temperature": 0.6, "top_k": 20})
    messages = [{"role": "user", "content": "x"}]
    for path, prompt in (("/v1/chat/completions", {"messages": messages}), ("/v1/completions", {"prompt": "x"})):
        for stated, expected in (
            ({}, (0.6, 20)),
            ({"temperature": None, "top_k": 3}, (0.6, 3)),
            ({"temperature": 1.0, "top_k": -1}, (1.0, -1)),
        ):
            assert server.http.post(path, json={**prompt, "max_tokens": 2, **stated}).status_code == 200
            sampling = server.engine.seen[-1].sampling
            assert (sampling.temperature, sampling.top_k) == expected
    generate(server.http, text="x", sampling_params={"max_new_tokens": 2, "top_k": 3})
    sampling = server.engine.seen[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 3, 1.0)
    assert server.http.get("/server_info").json()["sampling_defaults"] == {"temperature": 0.6, "top_k": 20}


def test_single_text(client: httpx.Client) -> None:
    result = generate(client, text="Hello", sampling_params=GREEDY)
    meta = result["meta_info"]
    assert len(result["output_ids"]) == 8
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert meta["completion_tokens"] == 8
    assert meta["prompt_tokens"] > 0
    assert meta["num_retractions"] == 0
    assert meta["cached_tokens"] <= meta["prompt_tokens"]
    assert 0 <= meta["queue_time"] <= meta["e2e_latency"]
    assert 0 < meta["first_token_latency"] <= meta["e2e_latency"] + 1
    assert isinstance(meta["id"], str)
    assert "output_token_logprobs" not in meta


def test_text_and_its_ids_give_the_same(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"text": "Hello there"}).json()["tokens"]
    by_text = generate(client, text="Hello there", sampling_params=GREEDY)
    by_ids = generate(client, input_ids=ids, sampling_params=GREEDY)
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_ids["meta_info"]["prompt_tokens"] == len(ids)


def test_second_time_is_cached(client: httpx.Client) -> None:
    text = "A prefix that is asked for twice"
    generate(client, text=text, sampling_params=GREEDY)
    again = generate(client, text=text, sampling_params=GREEDY)["meta_info"]
    assert again["cached_tokens"] == again["prompt_tokens"] - 1


def test_lists_give_lists_in_order(client: httpx.Client) -> None:
    texts = ["one", "two two", "three"]
    singles = [generate(client, text=text, sampling_params=GREEDY)["output_ids"] for text in texts]
    results = generate(client, text=texts, sampling_params=GREEDY)
    assert [result["output_ids"] for result in results] == singles
    assert len(generate(client, text=["only one"], sampling_params=GREEDY)) == 1
    by_ids = generate(client, input_ids=[[65, 66], [67]], sampling_params=[GREEDY, {**GREEDY, "max_new_tokens": 2}])
    assert [len(result["output_ids"]) for result in by_ids] == [8, 2]


def test_n_choices_of_each_prompt(client: httpx.Client) -> None:
    params = {"n": 3, "max_new_tokens": 4, "temperature": 1.0, "ignore_eos": True}
    results = generate(client, text="choices", sampling_params=params)
    assert len(results) == 3
    assert len({tuple(result["output_ids"]) for result in results}) > 1
    assert len(generate(client, text=["a", "b"], sampling_params=params)) == 6


def test_stream_is_cumulative(client: httpx.Client) -> None:
    whole = generate(client, text="stream me", sampling_params=GREEDY)
    events = events_of(client, "/generate", text="stream me", sampling_params=GREEDY)
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert "index" not in events[0]


def test_stream_of_a_list_has_indices(client: httpx.Client) -> None:
    params = {**GREEDY, "n": 2, "temperature": 1.0}
    events = events_of(client, "/generate", text=["a", "b"], sampling_params=params)
    ended = [event["index"] for event in events if event["meta_info"]["finish_reason"]]
    assert sorted(ended) == [0, 1, 2, 3]


def test_output_logprobs(client: httpx.Client) -> None:
    result = generate(
        client,
        text="logprobs",
        sampling_params=GREEDY,
        return_logprob=True,
        top_logprobs_num=2,
        token_ids_logprob=[65, 66],
        return_text_in_logprobs=True,
    )
    meta = result["meta_info"]
    entries = meta["output_token_logprobs"]
    assert [entry[1] for entry in entries] == result["output_ids"]
    assert all(entry[0] <= 0 and isinstance(entry[2], str) for entry in entries)
    assert all(len(top) == 2 and top[0][0] >= top[1][0] for top in meta["output_top_logprobs"])
    assert all([entry[1] for entry in chosen] == [65, 66] for chosen in meta["output_token_ids_logprobs"])
    assert meta["input_token_logprobs"] == []
    without_text = generate(client, text="logprobs", sampling_params=GREEDY, return_logprob=True)
    assert without_text["meta_info"]["output_token_logprobs"][0][2] is None


@pytest.mark.parametrize("start", [0, 3])
def test_prompt_logprobs(client: httpx.Client, start: int) -> None:
    ids = [72, 101, 108, 108, 111]
    meta = generate(client, input_ids=ids, sampling_params=GREEDY, return_logprob=True, logprob_start_len=start)[
        "meta_info"
    ]
    entries = meta["input_token_logprobs"]
    assert [entry[1] for entry in entries] == ids[start:]
    assert (entries[0][0] is None) == (start == 0)
    assert all(entry[0] <= 0 for entry in entries[1:])


def test_rid_names_the_request(client: httpx.Client) -> None:
    assert generate(client, text="x", rid="mine", sampling_params=GREEDY)["meta_info"]["id"] == "mine"
    listed = generate(client, text=["x", "y"], rid=["a1", "a2"], sampling_params=GREEDY)
    assert [result["meta_info"]["id"] for result in listed] == ["a1", "a2"]
    shared = generate(client, text=["x", "y"], rid="both", sampling_params=GREEDY)
    assert [result["meta_info"]["id"] for result in shared] == ["both-0", "both-1"]


def test_sampling_seed_is_seed(client: httpx.Client) -> None:
    params = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    first = generate(client, text="seeded", sampling_params={**params, "sampling_seed": 5})
    second = generate(client, text="seeded", sampling_params={**params, "seed": 5})
    assert first["output_ids"] == second["output_ids"]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "text", "got none of them"),
    ({"text": "a", "input_ids": [1]}, "text", "a text and input_ids"),
    ({"text": 5}, "text", "a text or a list"),
    ({"text": []}, "text", "at least one text"),
    ({"text": ["a", 1]}, "text", "at least one text"),
    ({"text": ""}, "text", "no tokens"),
    ({"input_ids": []}, "input_ids", "list of token ids"),
    ({"input_ids": [[]]}, "input_ids", "no tokens"),
    ({"input_ids": [1, "2"]}, "input_ids", "holds '2'"),
    ({"input_ids": [10**9]}, "input_ids", "holds 1000000000"),
    ({"input_ids": [-1]}, "input_ids", "holds -1"),
    ({"input_ids": [True]}, "input_ids", "holds True"),
    ({"text": "a", "sampling_params": 3}, "sampling_params", "must be an object"),
    ({"text": "a", "sampling_params": {"temprature": 1}}, "temprature", "Did you mean 'temperature'"),
    ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature", "temperature"),
    ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature", "between 0 and 100"),
    ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens", "between 0"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 10**30}}, "max_new_tokens", "max_new_tokens"),
    ({"text": "a", "sampling_params": {"n": 1000}}, "n", "between 1 and 128"),
    ({"text": "a", "sampling_params": {"json_schema": 5}}, "json_schema", "must be an object"),
    ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "ebnf", "at most one of them"),
    ({"text": "a", "sampling_params": {"regex": "a", "grammar_strict": 1}}, "grammar_strict", "true or false"),
    ({"text": "a", "sampling_params": {"stop_regex": "("}}, "stop_regex", "stop_regex"),
    ({"text": "a", "sampling_params": {"seed": 1, "sampling_seed": 2}}, "sampling_params.seed", "mean the same"),
    ({"text": "a", "image_data": "x.png"}, "image_data", "only text"),
    ({"text": "a", "lora_path": "x"}, "lora_path", "adapters"),
    ({"text": "a", "txt": "x"}, "txt", "Did you mean 'text'"),
    ({"text": "a", "stream": "yes"}, "stream", "valid boolean"),
    ({"text": "a", "rid": ""}, "rid", "must be a string"),
    ({"text": "a", "rid": ["x"]}, "rid", "must be a string"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid", "1 entries for 2 prompts"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "twice"),
    ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num", "needs return_logprob"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num", "between 0"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 99}, "logprob_start_len", "position 99"),
    ({"text": "a", "return_logprob": 1}, "return_logprob", "must be of type bool"),
    ({"text": "a", "priority": 1}, "priority", "--enable-priority-scheduling"),
    ({"text": "a", "routing_key": "k"}, "routing_key", "--schedule-policy routing-key"),
    ({"text": ["a"] * 1025}, "text", "at most 1024"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD, ids=[f"{i}-{bad[1]}" for i, bad in enumerate(BAD)])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_named(
    client: httpx.Client, body: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    if stream and "stream" not in body:
        body = {**body, "stream": True}
    response = client.post("/generate", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert generate(client, text="still here", sampling_params=GREEDY)["output_ids"]


def test_prompt_beyond_the_context(client: httpx.Client) -> None:
    longest = client.get("/server_info").json()["context_length"]
    response = client.post("/generate", json={"input_ids": [65] * (longest + 1)})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert str(longest + 1) in response.json()["error"]["message"]


def test_one_bad_prompt_refuses_the_list(client: httpx.Client) -> None:
    response = client.post("/generate", json={"input_ids": [[65], [10**6]], "stream": True})
    assert response.status_code == 400


def test_failed_choice(start_fake: Any) -> None:
    server = start_fake()
    with server.client() as client:
        response = client.post("/generate", json={"text": "[nan]"})
        assert response.status_code == 500
        assert response.json()["error"] == {
            "message": "The logits hold NaN.",
            "type": "server_error",
            "param": None,
            "code": "generation_failed",
        }
        results = generate(client, text=["[nan]", "fine"])
        assert results[0]["meta_info"]["finish_reason"] == {"type": "error", "message": "The logits hold NaN."}
        assert results[1]["meta_info"]["finish_reason"]["type"] == "length"
        events = events_of(client, "/generate", text="[nan]")
        assert events[-1]["error"]["code"] == "generation_failed"


def test_priority_and_routing_key_reach_the_engine(start_fake: Any) -> None:
    scheduler = SchedulerConfig(enable_priority_scheduling=True, schedule_policy="routing-key")
    server = start_fake(scheduler=scheduler)
    with server.client() as client:
        generate(client, text="x", priority=7, routing_key="k", cache_salt="s", sampling_params=GREEDY)
    seen = server.engine.seen[-1]
    assert (seen.priority, seen.routing_key, seen.cache_salt) == (7, "k", "s")


def test_a_prompt_that_was_cut_is_told(start_fake: Any) -> None:
    server = start_fake()
    server.engine.cut_from, server.engine.clamp = 5000, 7
    client = server.http
    assert generate(client, text="x")["meta_info"]["prompt_truncated_from"] == 5000
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": ["x", "y"]})):
        assert client.post(path, json=body).json()["prompt_truncated_from"] == 5000
        *_, last = events_of(client, path, **body)
        assert last["prompt_truncated_from"] == 5000
    # no limit was asked for, so none was lowered
    assert "max_new_tokens_clamped" not in client.post("/v1/chat/completions", json=chat).json()
    server.engine.cut_from = None
    assert "prompt_truncated_from" not in client.post("/v1/chat/completions", json=chat).json()


def test_clamped_limit_is_told(start_fake: Any) -> None:
    server = start_fake()
    server.engine.clamp = 5
    with server.client() as client:
        assert generate(client, text="x")["meta_info"]["max_new_tokens_clamped"] == 5
        chat = client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
        )
        assert chat.json()["max_new_tokens_clamped"] == 5
        text = client.post("/v1/completions", json={"prompt": "x"})
        assert text.json()["max_new_tokens_clamped"] == 5


def test_bodies_as_routers_write_them(client: httpx.Client) -> None:
    extra = {"log_metrics": True, "no_logs": False, "background": False, "return_bytes": False, "return_entropy": False}
    for model in (None, "unknown", "tiny"):
        body = {"text": "x", "model": model, "sampling_params": {"max_new_tokens": 2}, **extra}
        assert client.post("/generate", json=body).status_code == 200
    for field, value in (("no_logs", True), ("background", True), ("return_bytes", True), ("return_entropy", True)):
        answer = client.post("/generate", json={"text": "x", field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
    assert client.post("/generate", json={"text": "x", "model": "another"}).status_code == 404
