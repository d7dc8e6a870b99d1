"""Prompts that are far too long: refused or cut before anybody looks at each of their ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from server_fakes import ServerThread

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig, ServerConfig
from cardan.errors import RequestError
from cardan.server.prompts import check_prompt_ids

KEPT = 60 - 1 - 5
NO_TOKEN = 10**9


@pytest.fixture(scope="module")
def cutting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """A server with ``--allow-auto-truncate`` and a pool of 60 tokens."""
    from cardan.engine import Frontend
    from cardan.testing import write_tiny_model

    config = EngineConfig(
        model=ModelConfig(model=str(write_tiny_model(tmp_path_factory.mktemp("cut") / "tiny")), served_model_name="t"),
        platform=PlatformConfig(platform="null"),
        cache=CacheConfig(max_total_tokens=60),
        scheduler=SchedulerConfig(allow_auto_truncate=True),
        server=ServerConfig(port=0, log_level="error"),
    )
    server = ServerThread(lambda: Frontend.start(config), config).start()
    yield server
    server.stop()


def test_ids_behind_the_cut_are_not_looked_at(cutting: ServerThread) -> None:
    ids = [*range(1, KEPT + 1), *[NO_TOKEN] * 1000]
    whole = cutting.http.post("/generate", json={"input_ids": ids, "sampling_params": {"max_new_tokens": 2}}).json()
    assert whole["meta_info"]["prompt_truncated_from"] == len(ids)
    batch = cutting.http.post("/generate", json={"input_ids": [ids, [1, 2]], "sampling_params": {"max_new_tokens": 2}})
    assert ["prompt_truncated_from" in one["meta_info"] for one in batch.json()] == [True, False]
    for prompt in (ids, [ids, [1, 2]]):
        body = {"model": "t", "prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 0}
        answer = cutting.http.post("/v1/completions", json=body).json()
        assert answer["prompt_truncated_from"] == len(ids)
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == KEPT + 2
    wrong = [1, NO_TOKEN, *ids]
    assert cutting.http.post("/v1/completions", json={"prompt": wrong}).json()["error"]["param"] == "prompt"
    assert cutting.http.post("/generate", json={"input_ids": wrong}).json()["error"]["param"] == "input_ids"


def test_a_chat_that_is_cut_gets_what_room_is_left(cutting: ServerThread) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 500}], "ignore_eos": True}
    answer = cutting.http.post("/v1/chat/completions", json=body).json()
    assert answer["prompt_truncated_from"] > 500
    assert answer["usage"]["prompt_tokens"] == KEPT
    assert answer["usage"]["completion_tokens"] == 60 - KEPT - 1 - 1


def test_lists_of_prompts_are_refused_by_their_lengths_too(start_fake: Any) -> None:
    server = start_fake()
    too_long = [*[1] * 4091, "no id"]
    for path, name in (("/generate", "input_ids"), ("/v1/completions", "prompt")):
        for value in (too_long, [[1, 2], too_long]):
            error = server.http.post(path, json={name: value}).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "has 4092 token ids. At most 4090 fit" in error["message"]
    many = server.http.post("/v1/completions", json={"prompt": [["no id"]] * 1025}).json()["error"]
    assert "at most 1024 prompts, got 1025" in many["message"]


def test_only_what_the_engine_keeps_is_checked() -> None:
    assert check_prompt_ids([1, 2, 99, "x"], 10, "prompt", 2) == (1, 2, 99, "x")
    with pytest.raises(RequestError):
        check_prompt_ids([1, 2, 99], 10, "prompt", 3)
