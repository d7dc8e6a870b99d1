"""Logit processors of an installed package, named by requests over HTTP."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_fakes import ServerThread

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig, ServerConfig
from cardan.testing import write_tiny_model

SOURCE = '''
import numpy as np


def only(params):
    """Allow no token but those of params["ids"]."""
    ids = [int(token) for token in params["ids"]]

    def processor(prompt_ids, output_ids, logits):
        kept = logits[ids]
        logits[:] = -np.inf
        logits[ids] = kept
        return logits

    processor.sees_logits = True
    return processor


def adding(params):
    return lambda prompt_ids, output_ids: {params["id"]: 1e5}


def raising(params):
    return lambda prompt_ids, output_ids: 1 / 0
'''


@pytest.fixture(scope="module")
def processing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """A server on the null platform beside a package with processors; its processes get the same path."""
    package = tmp_path_factory.mktemp("package")
    (package / "acme_processors.py").write_text(SOURCE)
    folder = package / "acme_processors-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-processors\nVersion: 1.0\n")
    points = "".join(f"{name} = acme_processors:{name}\n" for name in ("only", "adding", "raising"))
    (folder / "entry_points.txt").write_text(f"[cardan.logit_processors]\n{points}")
    sys.path.insert(0, str(package))
    importlib.invalidate_caches()
    config = EngineConfig(
        model=ModelConfig(model=str(write_tiny_model(package / "tiny")), served_model_name="tiny"),
        platform=PlatformConfig(platform="null"),
        cache=CacheConfig(max_total_tokens=4096),
        scheduler=SchedulerConfig(random_seed=1, enable_custom_logit_processor=True),
        server=ServerConfig(port=0, log_level="error"),
    )

    async def make() -> Any:
        from cardan.engine import Frontend

        return await Frontend.start(config)

    server = ServerThread(make, config).start()
    yield server
    server.stop()
    sys.path.remove(str(package))


@pytest.fixture
def client(processing: ServerThread) -> Iterator[httpx.Client]:
    yield processing.http
    processing.wait_idle()


ONLY = {"name": "only", "params": {"ids": [40, 41, 45]}}


def test_requests_name_one(client: httpx.Client) -> None:
    params = {"max_new_tokens": 8, "ignore_eos": True}
    answer = client.post("/generate", json={"text": "x", "sampling_params": params, "custom_logit_processor": ONLY})
    assert set(answer.json()["output_ids"]) <= {40, 41, 45}
    free = client.post("/generate", json={"text": "x", "sampling_params": params}).json()["output_ids"]
    assert not set(free) <= {40, 41, 45}
    text = client.post("/detokenize", json={"tokens": [40, 41, 45]}).json()["text"]
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 6, "ignore_eos": True}
    for route, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "x", "ignore_eos": True})):
        choice = client.post(route, json={"model": "tiny", **body, "custom_logit_processor": ONLY, "n": 2})
        assert choice.status_code == 200, choice.text
        for one in choice.json()["choices"]:
            assert set(one.get("text") or one["message"]["content"]) <= set(text)


def test_each_prompt_may_have_its_own(client: httpx.Client) -> None:
    adding = {"name": "adding", "params": {"id": 50}}
    body = {"text": ["x", "y", "z"], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    answers = client.post("/generate", json={**body, "custom_logit_processor": [ONLY, adding, None]}).json()
    assert set(answers[0]["output_ids"]) <= {40, 41, 45}
    assert answers[1]["output_ids"] == [50, 50, 50]
    assert set(answers[2]["output_ids"]) != {50}


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        ("nobody", 400, "Installed: adding, only, raising"),
        ({"name": "only"}, 400, "does not take these parameters: KeyError: 'ids'"),
        ({"name": "only", "params": {"ids": [10**6]}}, 500, "Its logit processor failed"),
        ({"name": "only", "params": {"ids": []}}, 500, "it forbids every token"),
        ("raising", 500, "ZeroDivisionError"),
    ],
)
def test_what_goes_wrong_is_told(client: httpx.Client, asked: Any, status: int, message: str) -> None:
    answer = client.post("/generate", json={"text": "x", "custom_logit_processor": asked})
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert client.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 1}}).status_code == 200
