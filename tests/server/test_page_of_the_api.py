"""What docs/http-api.md and docs/operating.md say of all routes, and no other test tries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fakes import FakeEngine

from cardan.server.http.auth import ADMIN_PATHS, OPEN_PATHS, PAGE_PATHS

DOCS = Path(__file__).parents[2] / "docs"
HTTP_API = " ".join((DOCS / "http-api.md").read_text(encoding="utf-8").split())
OPERATING = " ".join((DOCS / "operating.md").read_text(encoding="utf-8").split())
MESSAGES = [{"role": "user", "content": "x"}]
LABELS = {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 2},
    "/api/chat": {"model": "tiny", "messages": MESSAGES, "stream": False},
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 2}},
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_labels_that_ask_for_nothing(client: httpx.Client, path: str) -> None:
    assert all(f"`{name}`" in HTTP_API for name in LABELS)
    labels = {**LABELS, "parallel_tool_calls": True, "tool_choice": "auto"}
    response = client.post(path, json={**ASKED[path], **labels})
    assert response.status_code == 200, response.text


IMAGE = "data:image/png;base64,AAAA"
MEDIA: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": kind, kind: {}}]}]})
    for kind in ("image_url", "input_audio", "file")
]
MEDIA += [
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": kind, "image_url": IMAGE}]}]})
    for kind in ("input_image", "input_file")
]
MEDIA += [
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": kind, "source": {"type": "base64"}}]}]})
    for kind in ("image", "document")
]
MEDIA += [
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["AAAA"]}]}),
    ("/generate", {"image_data": IMAGE}),
    ("/generate", {"audio_data": IMAGE}),
]


@pytest.mark.parametrize(("path", "fields"), MEDIA)
def test_images_audio_and_documents_are_refused(client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    assert "Images, audio and documents are refused." in HTTP_API
    response = client.post(path, json={**ASKED[path], **fields})
    assert response.status_code == 400
    assert "text" in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_too_much_to_do(start_fake: Any, path: str, stream: bool) -> None:
    engine = FakeEngine()
    engine.full = True
    server = start_fake(engine)
    response = server.http.post(path, json={**ASKED[path], "stream": stream})
    assert response.status_code == (529 if path == "/v1/messages" else 503)
    assert response.headers["Retry-After"] == "3"
    if path == "/v1/messages":
        assert "the status is 529" in HTTP_API
        assert response.json()["error"]["type"] == "overloaded_error"
    assert server.stats()["open_requests"] == 0


def test_what_needs_no_key(start_fake: Any) -> None:
    server = start_fake(api_key="secret", admin_api_key="other")
    with httpx.Client(base_url=server.url) as stranger:
        for path in (*OPEN_PATHS, *PAGE_PATHS):
            assert stranger.get(path).status_code == 200, path
        for path in ("/metrics", "/docs", "/openapi.json", "/v1/models", "/page/live", "/server_info"):
            assert stranger.get(path).status_code == 401, path
            assert stranger.get(path, headers={"X-API-Key": "secret"}).status_code == 200, path
        for path in ADMIN_PATHS:
            assert stranger.post(path, headers={"X-API-Key": "secret"}).status_code == 401, path
    for path in OPEN_PATHS:
        assert f"`{path}`" in OPERATING


def test_where_a_cut_prompt_is_told(start_fake: Any) -> None:
    engine = FakeEngine()
    engine.cut_from = 99
    server = start_fake(engine)
    for path, body in ASKED.items():
        answer = server.http.post(path, json=body).json()
        told = answer["meta_info"] if path == "/generate" else answer
        has_place = path in ("/generate", "/v1/chat/completions", "/v1/completions")
        assert told.get("prompt_truncated_from") == (99 if has_place else None), path
