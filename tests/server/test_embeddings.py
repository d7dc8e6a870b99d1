"""``/v1/embeddings`` with OpenAI's and Ollama's clients; vectors depend on no chunk, batch or cached prefix."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest
from server_fakes import ServerThread

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig, ServerConfig


def embedding_server(folder: Path, pooling: Any, platform: str = "null") -> ServerThread:
    from cardan.engine import Frontend
    from cardan.testing import write_tiny_model

    seed = None if platform == "null" else 1
    model = ModelConfig(
        model=str(write_tiny_model(folder)),
        served_model_name="tiny",
        random_weights=seed,
        is_embedding=True,
        embedding_pooling=pooling,
    )
    config = EngineConfig(
        model=model,
        platform=PlatformConfig(platform=platform),
        cache=CacheConfig(max_total_tokens=2048),
        scheduler=SchedulerConfig(chunked_prefill_size=16, random_seed=1),
        server=ServerConfig(port=0, log_level="error"),
    )

    async def make() -> Any:
        return await Frontend.start(config)

    return ServerThread(make, config).start()


@pytest.fixture(scope="module", params=["last", "mean"])
def embedder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    server = embedding_server(tmp_path_factory.mktemp("embedder") / "tiny", request.param)
    yield server
    server.wait_idle()
    server.stop()


@pytest.fixture(scope="module")
def api(embedder: ServerThread) -> Iterator[openai.OpenAI]:
    with embedder.openai() as api:
        yield api


def embed(api: openai.OpenAI, value: Any, **fields: Any) -> list[list[float]]:
    return [entry.embedding for entry in api.embeddings.create(model="tiny", input=value, **fields).data]


IDS = [[65 + (7 * i * i + j) % 60 for i in range(n)] for j, n in enumerate((1, 5, 16, 17, 50))]


def test_texts_ids_and_batches_give_the_same(embedder: ServerThread, api: openai.OpenAI) -> None:
    text = "The quick brown fox jumps over the lazy dog, again and again."
    ids = embedder.http.post("/tokenize", json={"text": text}).json()["tokens"]
    (by_text,) = embed(api, text)
    assert embed(api, ids) == embed(api, [ids]) == embed(api, [text]) == [by_text]
    assert np.linalg.norm(by_text) == pytest.approx(1, rel=1e-6), "in float32, which the client asks for"
    alone = [embed(api, one)[0] for one in IDS]
    embedder.http.post("/flush_cache")
    together = embed(api, IDS)
    for one, other in zip(alone, together, strict=True):
        assert other == pytest.approx(one)
    assert len({tuple(vector) for vector in alone}) == len(IDS)
    usage = api.embeddings.create(model="tiny", input=IDS).usage
    assert usage.prompt_tokens == usage.total_tokens == sum(map(len, IDS))


def test_forms_and_dimensions(embedder: ServerThread, api: openai.OpenAI) -> None:
    whole = np.asarray(embed(api, "Hello", encoding_format="float")[0])
    assert embed(api, "Hello")[0] == pytest.approx(whole, rel=1e-6), "the client asks for base64 by itself"
    raw = embedder.http.post("/v1/embeddings", json={"input": "Hello", "encoding_format": "base64"}).json()
    assert np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4") == pytest.approx(whole, rel=1e-6)
    short = embed(api, "Hello", dimensions=3)[0]
    assert short == pytest.approx(whole[:3] / np.linalg.norm(whole[:3]), rel=1e-6)
    with pytest.raises(openai.BadRequestError, match="this model's embeddings have 8"):
        embed(api, "Hello", dimensions=9)


def test_ollama(embedder: ServerThread, api: openai.OpenAI) -> None:
    with ollama.Client(host=embedder.url, verify=False) as llama:
        assert llama.show("tiny").capabilities == ["embedding"]
        told = llama.embed(model="tiny:latest", input=["Hello", "World"])
    for vector, expected in zip(told.embeddings, embed(api, ["Hello", "World"]), strict=True):
        assert vector == pytest.approx(expected, rel=1e-6)
    assert told.prompt_eval_count == api.embeddings.create(model="tiny", input=["Hello", "World"]).usage.prompt_tokens


def test_only_embeddings_are_made(embedder: ServerThread) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", chat),
        ("/v1/responses", {"input": "x"}),
        ("/generate", {"text": "x"}),
        ("/v1/score", {"query": "x", "items": "y", "label_token_ids": [65]}),
        ("/api/generate", {"model": "tiny", "prompt": "x"}),
    ):
        for extra in ({}, {"stream": True}) if path != "/v1/score" else ({},):
            response = embedder.http.post(path, json={**body, **extra})
            assert response.status_code == 400, path
            assert "generates no text" in response.text
    assert embedder.http.get("/health_generate").json() == {"status": "ok"}
    assert embedder.http.get("/model_info").json()["is_generation"] is False


def test_embeddings_need_the_flag(client: httpx.Client) -> None:
    for path, body in (("/v1/embeddings", {"input": "x"}), ("/api/embed", {"model": "tiny", "input": "x"})):
        response = client.post(path, json=body)
        assert response.status_code == 400
        assert "Start one with --is-embedding" in response.text


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "is required"),
    ({"input": []}, "input", "1 to 1024 texts, got 0"),
    ({"input": ["x"] * 1025}, "input", "got 1025"),
    ({"input": [[10**7]]}, "input", "ids of this model"),
    ({"encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
    ({"dimensions": 0}, "dimensions", "greater than or equal to 1"),
    ({"temperature": 1}, "temperature", "Unknown field"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=[f"{i}-{bad[1]}" for i, bad in enumerate(BAD)])
def test_bad_requests_are_named(embedder: ServerThread, fields: dict[str, Any], param: str, message: str) -> None:
    response = embedder.http.post("/v1/embeddings", json={"input": "x", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"] or "").startswith(param)
    assert message in error["message"]


def test_an_empty_text_has_no_embedding(embedder: ServerThread) -> None:
    response = embedder.http.post("/v1/embeddings", json={"input": [[]]})
    assert response.status_code == 400
    assert "at least one" in response.json()["error"]["message"]
