"""``/openapi.json`` and ``/docs``: the document is valid, complete, and true of what routes answer."""

from __future__ import annotations

import gc
import re
from typing import Any

import httpx
import jsonschema
import pytest
from openapi_spec_validator import validate
from server_fakes import ServerThread
from starlette.routing import Route

CHAT: Any = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/api/chat": {"model": "tiny", "messages": CHAT["messages"], "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"model": "tiny", "prompt": "x", "stream": False, "options": {"num_predict": 2}},
    "/api/show": {"model": "tiny"},
    "/generate": {"text": ["x", "y"], "sampling_params": {"max_new_tokens": 2}},
    "/v1/score": {"query": "x", "items": ["y", "z"], "label_token_ids": [65, 66]},
    "/tokenize": {"text": "x"},
    "/v1/tokenize": {"text": "x"},
    "/detokenize": {"tokens": [65]},
    "/v1/detokenize": {"tokens": [65]},
    "/configure_logging": {"log_requests": False},
    "/freeze_gc": {},
    "/abort_request": {"rid": "none"},
    "/flush_cache": {},
}
ELSEWHERE = {
    "/start_profile",
    "/stop_profile",
    "/separate_reasoning",
    "/parse_function_call",
    "/v1/responses/{response_id}/cancel",
    "/v1/embeddings",
    "/api/embed",
}
"""Routes that answer only where a model's format is known, to what runs in the background, or with a flag."""


@pytest.fixture(scope="module")
def document(shared_server: ServerThread) -> dict[str, Any]:
    found: dict[str, Any] = shared_server.http.get("/openapi.json").json()
    return found


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    validate(document)
    assert document["openapi"].startswith("3.1")


def test_only_profiles_start_without_a_body(document: dict[str, Any]) -> None:
    bodies = {
        path: one["post"]["requestBody"]
        for path, one in document["paths"].items()
        if "requestBody" in one.get("post", {})
    }
    assert {path for path, body in bodies.items() if not body["required"]} == {"/start_profile"}


def test_every_route_of_the_application_is_in_it(server: ServerThread, document: dict[str, Any]) -> None:
    served = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in server.app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    described = {(path, method) for path, item in document["paths"].items() for method in item}
    assert described == served


def test_a_server_without_metrics_describes_none(start_fake: Any) -> None:
    paths = start_fake(enable_metrics=False).http.get("/openapi.json").json()["paths"]
    assert "/metrics" not in paths
    assert "/health" in paths


def test_operations_are_told_apart(document: dict[str, Any]) -> None:
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids))


def _resolve(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "components": document["components"]}


@pytest.mark.parametrize("path", sorted(BODIES))
def test_bodies_and_answers_are_as_described(
    client: httpx.Client, document: dict[str, Any], model: str, path: str
) -> None:
    body = {**BODIES[path], **({"model": model} if "model" in BODIES[path] else {})}
    operation = document["paths"][path]["post"]
    if "requestBody" in operation:
        asked = operation["requestBody"]["content"]["application/json"]["schema"]
        jsonschema.validate(body, _resolve(document, asked))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**body, "colour": 1}, _resolve(document, asked))
        wrong = client.post(path, json={**body, "colour": 1})
        told = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
        jsonschema.validate(wrong.json(), _resolve(document, told))
    response = client.post(path, json=body)
    gc.unfreeze()  # the server is a thread of this process
    assert response.status_code == 200, response.text
    answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer != {"type": "string"}
    jsonschema.validate(response.json(), _resolve(document, answer))


def test_what_is_read_is_as_described(client: httpx.Client, document: dict[str, Any], model: str) -> None:
    stored = client.post("/v1/responses", json=BODIES["/v1/responses"]).json()["id"]
    for path, item in document["paths"].items():
        if "get" not in item:
            continue
        described = item["get"]["responses"]["200"]["content"]
        (media_type, content), *others = described.items()
        asked = path.replace("{model}", model).replace("{response_id}", stored)
        for other, _ in others:
            assert client.get(asked, headers={"Accept": other}).headers["content-type"].startswith(other)
        response = client.get(asked, headers={"Accept": media_type})
        assert response.status_code == 200, path
        assert response.headers["content-type"].startswith(media_type)
        if media_type == "application/json":
            assert content["schema"] != {"type": "string"}, path
            jsonschema.validate(response.json(), _resolve(document, content["schema"]))


def test_what_is_deleted_is_as_described(client: httpx.Client, document: dict[str, Any]) -> None:
    stored = client.post("/v1/responses", json=BODIES["/v1/responses"]).json()["id"]
    operation = document["paths"]["/v1/responses/{response_id}"]["delete"]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(client.delete(f"/v1/responses/{stored}").json(), schema)


def test_every_body_is_tried(document: dict[str, Any]) -> None:
    asked = {path for path, item in document["paths"].items() if "post" in item}
    assert asked - ELSEWHERE == set(BODIES)


def test_values_that_are_taken_are_described(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["OpenAIChatBody"]["properties"]
    for name, values in {
        "stop": ["x", ["x", "y"]],
        "logit_bias": [{"65": -1.5}],
        "stop_token_ids": [[1, 2]],
        "seed": [3],
        "top_k": [-1, 5],
    }.items():
        for value in values:
            jsonschema.validate(value, fields[name])
    assert fields["temperature"]["minimum"] == 0


def test_streams_and_keys_are_described(document: dict[str, Any]) -> None:
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert "text/event-stream" in chat["responses"]["200"]["content"]
    assert "application/x-ndjson" in document["paths"]["/api/chat"]["post"]["responses"]["200"]["content"]
    assert document["paths"]["/health"]["get"]["security"] == []
    (query,) = document["paths"]["/v1/messages"]["post"]["parameters"]
    assert (query["name"], query["in"], query["required"]) == ("beta", "query", False)


def test_the_page_names_every_route_and_loads_nothing(client: httpx.Client, document: dict[str, Any]) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    for path in document["paths"]:
        assert f"<code>{path}</code>" in page.text
    assert "<script" not in page.text
    assert "http" not in page.text.replace("http://www.w3.org", "")
    assert "<code>max_completion_tokens</code>" in page.text
