"""Ten thousand bodies that nobody would write: no 500, no hang, nothing left behind."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fakes import ServerThread

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, ServerConfig
from cardan.server.routes import GROUPS
from cardan.testing import write_tiny_model

pytestmark = pytest.mark.slow

BODIES = 10_000
AT_ONCE = 8
TELLING = {503, 504}
"""Statuses from 500 on that a mutated body may get: the queue is full, or it ran too long."""

_USER = {"role": "user", "content": "hello"}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}

SEEDS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"model": "tiny", "messages": [_USER], "max_tokens": 2, "temperature": 0.5, "n": 2, "logprobs": True,
         "top_logprobs": 2, "stop": ["a", "b"], "seed": 3, "logit_bias": {"5": 1.0}},
        {"model": "tiny", "messages": [{"role": "system", "content": "s"}, _USER], "max_completion_tokens": 2,
         "stream": True, "stream_options": {"include_usage": True}, "presence_penalty": 0.5},
        {"model": "tiny", "messages": [_USER], "max_tokens": 3, "response_format": {
            "type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
        {"model": "tiny", "messages": [_USER], "max_tokens": 3, "tools": [_TOOL], "tool_choice": "auto"},
    ],
    "/v1/completions": [
        {"model": "tiny", "prompt": "hello", "max_tokens": 2, "echo": True, "logprobs": 2},
        {"model": "tiny", "prompt": [[1, 2], [3]], "max_tokens": 2, "stream": True, "frequency_penalty": 0.1},
    ],
    "/v1/messages": [
        {"model": "tiny", "messages": [_USER], "max_tokens": 2, "system": [{"type": "text", "text": "s"}],
         "stop_sequences": ["x"], "top_k": 3, "metadata": {"user_id": "u"}},
        {"model": "tiny", "messages": [_USER], "max_tokens": 2, "stream": True},
    ],
    "/v1/messages/count_tokens": [{"model": "tiny", "messages": [_USER], "system": "s"}],
    "/api/chat": [{"model": "tiny", "messages": [_USER], "options": {"num_predict": 2, "top_k": 3}, "stream": False}],
    "/api/generate": [{"model": "tiny", "prompt": "hello", "options": {"num_predict": 2, "stop": ["a"]}}],
    "/api/show": [{"model": "tiny", "verbose": True}],
    "/generate": [
        {"text": "hello", "sampling_params": {"max_new_tokens": 2, "top_p": 0.9, "min_p": 0.1}, "return_logprob": True,
         "top_logprobs_num": 2, "token_ids_logprob": [1, 2], "rid": "r"},
        {"input_ids": [[1, 2, 3], [4]], "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}],
         "stream": True},
    ],
    "/v1/responses": [
        {"model": "tiny", "input": "hello", "max_output_tokens": 2, "instructions": "i", "metadata": {"a": "b"}},
        {"model": "tiny", "input": [_USER], "max_output_tokens": 2, "stream": True, "store": False},
    ],
    "/v1/score": [{"model": "tiny", "query": "q", "items": ["a", "b"], "label_token_ids": [1, 2]}],
    "/v1/embeddings": [{"model": "tiny", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 2}],
    "/api/embed": [{"model": "tiny", "input": ["a"], "dimensions": 2}],
    "/start_profile": [{"num_steps": 5}],
    "/configure_logging": [{"log_requests": False}],
    "/tokenize": [{"text": "hello", "add_special_tokens": False}],
    "/v1/tokenize": [{"text": "hello", "add_special_tokens": False}],
    "/detokenize": [{"tokens": [1, 2, 3], "skip_special_tokens": False}],
    "/v1/detokenize": [{"tokens": [1, 2, 3], "skip_special_tokens": False}],
    "/separate_reasoning": [{"text": "<think>a</think>b", "reasoning_parser": "qwen3"}],
    "/parse_function_call": [{"text": "x", "tool_call_parser": "hermes", "tools": [_TOOL]}],
    "/abort_request": [{"rid": "nobody"}],
}  # fmt: skip
"""Bodies that are right, for every route that takes one."""

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**40, 1.5, -0.0, 1e308, float("inf"), float("nan"), "", "x",
    "\x00", "é€😀", "\ud800", "9" * 5000, "a" * 20000, [], [[]], [None], [[1], [2.5]], {}, {"a": {}}, {"type": "x"},
    [1] * 5000, {"k" * 200: 1}, "none", "auto", [{"role": "user"}], {"$ref": "#"}, {"type": "object", "properties": 3},
]  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a value with every key in it."""
    found = []
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found.append((value, key))
        found.extend(places(value[key]))
    return found


def mutated(rng: random.Random, seed: dict[str, Any]) -> bytes:
    """A body that differs from the seed in one to three places, or in its bytes."""
    body = json.loads(json.dumps(seed))
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(places(body) or [(body, "x")])
        action = rng.randrange(4)
        if action == 0 and isinstance(container, dict):
            container.pop(key, None)
        elif action == 1 and isinstance(container, dict):
            container[rng.choice(["x", "n", "stream", "model", "temperature", "tools", "\x7f"])] = copy.deepcopy(
                rng.choice(ODD)
            )
        else:
            container[key] = copy.deepcopy(rng.choice(ODD))
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    spoil: list[Callable[[], bytes]] = [
        lambda: data[: rng.randrange(len(data) + 1)],
        lambda: data[: (at := rng.randrange(len(data)))] + bytes([rng.randrange(256)]) + data[at + 1 :],
        lambda: data + rng.choice([b"}", b"\x00", b"{}", data]),
        lambda: b"[" * rng.randrange(1, 5000),
        lambda: b'{"model":"tiny",' + data[1:],
    ]
    return rng.choice(spoil)() if rng.random() < 0.15 else data


@pytest.fixture
def null_server(tmp_path: Path) -> Any:
    config = EngineConfig(
        model=ModelConfig(model=str(write_tiny_model(tmp_path / "tiny")), served_model_name="tiny"),
        platform=PlatformConfig(platform="null"),
        cache=CacheConfig(max_total_tokens=8192),
        # Some ask for a million tokens; what runs long is aborted, which is tried here as well.
        server=ServerConfig(port=0, log_level="error", request_timeout_s=3.0, max_body_bytes=2**20),
    )

    async def make() -> Any:
        from cardan.engine import Frontend

        return await Frontend.start(config)

    server = ServerThread(make, config).start()
    yield server
    server.stop()


def test_every_route_with_a_body_has_seeds() -> None:
    taking = {path for routes in GROUPS.values() for route in routes if route.body for path in route.paths}
    assert taking <= SEEDS.keys(), taking - SEEDS.keys()


def test_ten_thousand_mutated_bodies(null_server: ServerThread) -> None:
    rng = random.Random(20)
    routes = sorted(SEEDS)
    tries = [(route, mutated(rng, rng.choice(SEEDS[route]))) for route in rng.choices(routes, k=BODIES)]
    statuses: Counter[int] = Counter()

    def send(client: httpx.Client, one: tuple[str, bytes]) -> None:
        route, body = one
        try:
            answer = client.post(route, content=body, headers={"Content-Type": "application/json"})
        except httpx.HTTPError as error:
            raise AssertionError(f"{type(error).__name__} for POST {route} {body[:500]!r}") from error
        assert answer.status_code < 500 or answer.status_code in TELLING, f"{answer.text} for {route} {body[:500]!r}"
        if answer.status_code >= 400:
            assert "error" in answer.json(), f"{answer.text} for {route} {body[:500]!r}"
        statuses[answer.status_code] += 1

    def send_all(mine: list[tuple[str, bytes]]) -> None:
        with null_server.client() as client:
            for one in mine:
                send(client, one)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(send_all, tries[i::AT_ONCE]) for i in range(AT_ONCE)]:
            done.result()
    assert sum(statuses.values()) == BODIES
    assert statuses[200] > BODIES / 20
    assert statuses[400] > BODIES / 4
    null_server.wait_idle()
    assert null_server.http.post("/generate", json={"text": "x"}).status_code == 200
    assert null_server.http.post("/flush_cache").status_code == 200
    assert null_server.stats()["used_tokens"] == 0
