"""Structured output with OpenAI's client against a real server, and the header that names what is not enforced."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))

from server_fakes import TEMPLATE, ServerThread

from cardan.engine import Frontend
from cardan.engine.options import config_from_options
from cardan.testing import write_tiny_model


def serve(**options: Any) -> ServerThread:
    config = config_from_options({"port": 0, "log_level": "error", "random_seed": 1, **options})

    async def make() -> Any:
        return await Frontend.start(config)

    return ServerThread(make, config).start()


class City(pydantic.BaseModel):
    """What the model is asked for."""

    name: str = pydantic.Field(max_length=20)
    population: int
    is_capital: bool


@pytest.fixture(scope="module")
def tiny_options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_tiny_model(tmp_path_factory.mktemp("served") / "tiny")
    template = folder.with_name("tools.jinja")
    template.write_text(TEMPLATE)
    return {"model": str(folder), "platform": "null", "max_total_tokens": 8192, "chat_template": str(template)}


@pytest.fixture(scope="module")
def tiny_server(tiny_options: dict[str, Any]) -> Iterator[ServerThread]:
    server = serve(**tiny_options)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def terse_server(tiny_options: dict[str, Any]) -> Iterator[ServerThread]:
    """One whose JSON has no white space, so that no random model writes nothing else to its limit."""
    server = serve(**tiny_options, json_whitespace="none")
    yield server
    server.stop()


def ask(server: ServerThread, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "Paris?"}], "max_tokens": 200, **fields}
    return server.http.post("/v1/chat/completions", json=body)


def test_the_header_names_what_is_not_enforced(tiny_server: ServerThread) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3, "uniqueItems": True, "ß,\n": 1}
    for stream in (False, True):
        format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": False}}
        answer = ask(tiny_server, response_format=format_, stream=stream)
        assert answer.status_code == 200, answer.text
        assert answer.headers["X-Cardan-Unenforced"] == "uniqueItems, ???"
    refused = ask(tiny_server, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert refused.status_code == 400
    assert "uniqueItems (at /uniqueItems)" in refused.json()["error"]["message"]
    plain = ask(tiny_server, regex="ok")
    assert plain.json()["choices"][0]["message"]["content"] == "ok"
    assert "X-Cardan-Unenforced" not in plain.headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_does_not_compile_is_a_400(tiny_server: ServerThread, stream: bool) -> None:
    answer = ask(tiny_server, regex="(", stream=stream)
    assert answer.status_code == 400
    assert "unclosed group" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "regex"


OBJECT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}
TAGS: dict[str, Any] = {
    "structures": [{"begin": "<f>", "schema": OBJECT, "end": "</f>"}],
    "triggers": ["<"],
}
GBNF = 'root ::= "ab" | "cde"'
OK = r"\{\"ok\":(true|false)\}"
ENTERS: dict[str, Any] = {"logit_bias": {str(ord("<")): 100}, "stop": ["</f>"]}
"""Makes the model write ``<`` where it is free to, and end with the first span."""
TAGGED = "<f>" + OK
CLOSES: dict[str, Any] = {"logit_bias": {str(ord("}")): 100}}
"""Makes the model close an object as soon as it may."""
WAYS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": FORM}, OK),
    ({"response_format": {"type": "json_object"}, **CLOSES}, r"\{\}"),
    ({"response_format": {"type": "text"}, "regex": "[xy]{3}"}, "[xy]{3}"),
    ({"response_format": {"type": "structural_tag", **TAGS}, **ENTERS}, TAGGED),
    ({"json_schema": OBJECT}, OK),
    ({"json_schema": json.dumps(OBJECT)}, OK),
    ({"guided_json": OBJECT}, OK),
    ({"regex": "[ab]{3}"}, "[ab]{3}"),
    ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
    ({"ebnf": GBNF}, "ab|cde"),
    ({"ebnf": 'start: "ab" | "cde"'}, "ab|cde"),
    ({"guided_grammar": GBNF}, "ab|cde"),
    ({"choice": ["ab", "cde"]}, "ab|cde"),
    ({"guided_choice": ["ab", "cde"]}, "ab|cde"),
    ({"structural_tag": TAGS, **ENTERS}, TAGGED),
    ({"structured_outputs": {"json": OBJECT}}, OK),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"structured_outputs": {"choice": ["ab", "cde"]}}, "ab|cde"),
    ({"structured_outputs": {"grammar": GBNF}}, "ab|cde"),
    ({"structured_outputs": {"json_object": True}, **CLOSES}, r"\{\}"),
    ({"structured_outputs": {"structural_tag": TAGS}, **ENTERS}, TAGGED),
    ({"structured_outputs": {"json": None, "regex": "[ab]{3}"}}, "[ab]{3}"),
]


NATIVE = {"json_schema", "regex", "ebnf", "choice", "structural_tag", "logit_bias", "stop"}


@pytest.mark.parametrize(("fields", "pattern"), WAYS, ids=[f"{i}-{next(iter(way))}" for i, (way, _) in enumerate(WAYS)])
def test_every_way_to_ask(terse_server: ServerThread, fields: dict[str, Any], pattern: str) -> None:
    chat = ask(terse_server, **fields).json()["choices"][0]["message"]["content"]
    post = terse_server.http.post
    text = post("/v1/completions", json={"prompt": "x", "max_tokens": 200, **fields}).json()["choices"][0]["text"]
    answers = [chat, text]
    if set(fields) <= NATIVE:
        native = post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 200, **fields}})
        answers.append(native.json()["text"])
    for answer in answers:
        assert re.fullmatch(pattern, answer), answer


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "a", "choice": ["b"]}, "'regex' and 'choice' both constrain the output"),
        ({"response_format": FORM, "ebnf": GBNF}, "both constrain the output; at most one of them can"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "may have one entry, got choice, regex"),
        ({"structured_outputs": {"jsn": OBJECT}}, "has the unknown field 'jsn'"),
        ({"structured_outputs": []}, "'structured_outputs' must be an object"),
        ({"response_format": "json"}, "must be an object whose 'type' is text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "must be an object with 'name' and 'schema'"),
        ({"response_format": {"type": "json_object", "schema": OBJECT}}, "has the unknown field 'schema'"),
        ({"choice": []}, "'choice' must be a list of at least one text"),
        ({"choice": ["a", ""]}, "at least one text, none of them empty"),
        ({"regex": ""}, "'regex' must be a text, not empty"),
        ({"json_schema": 5}, "'json_schema' must be an object, or its JSON as a text"),
        ({"structural_tag": {"structures": []}}, "expected {'structures'"),
    ],
)
def test_wrong_ways_to_ask_are_named(tiny_server: ServerThread, fields: dict[str, Any], message: str) -> None:
    answer = ask(tiny_server, **fields)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


WIDE = "start: " + " | ".join(f'"c{number}"' for number in range(5000))
"""Its first token leaves so many ways to go on that the backend gives up."""


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_runs_into_a_limit_is_the_requests_fault(tiny_server: ServerThread, stream: bool) -> None:
    answer = ask(tiny_server, ebnf=WIDE, stream=stream)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "grammar_limit"
    assert error["type"] == "invalid_request_error"
    assert "max is" in error["message"]


def test_a_request_that_forbids_every_token_is_told_so(tiny_server: ServerThread) -> None:
    params = {"regex": "[ab]+", "logit_bias": {str(token): -1e300 for token in range(250)}}
    answer = tiny_server.http.post("/generate", json={"text": "x", "sampling_params": params})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "no_token_allowed"
    assert "Forbid less" in answer.json()["error"]["message"]
    good = {"max_new_tokens": 2}
    many = tiny_server.http.post("/generate", json={"text": ["x", "y"], "sampling_params": [params, good]})
    assert many.status_code == 200
    bad, fine = (one["meta_info"]["finish_reason"] for one in many.json())
    assert (bad["type"], bad["code"]) == ("error", "no_token_allowed"), "no fault of the engine's"
    assert fine == {"type": "length", "length": 2}


@pytest.mark.slow
@pytest.mark.model
def test_openais_client_gets_what_it_asks_for(smollm2_path: Path) -> None:
    server = serve(model=str(smollm2_path), platform="cpu", context_length=2048, max_total_tokens=8192)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=280)
        messages: Any = [{"role": "user", "content": "Describe the city of Paris as JSON."}]
        common: dict[str, Any] = {"model": client.models.list().data[0].id, "messages": messages, "max_tokens": 120}
        parsed = client.beta.chat.completions.parse(**common, response_format=City, temperature=0)
        assert isinstance(parsed.choices[0].message.parsed, City)
        schema = City.model_json_schema() | {"additionalProperties": False}
        format_: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
        answer = client.chat.completions.create(**common, response_format=format_, temperature=1, seed=3)
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)
        choice = client.chat.completions.create(**common, extra_body={"guided_choice": ["Paris", "Rome"]})
        assert choice.choices[0].message.content in ("Paris", "Rome")
    finally:
        server.stop()


UNIQUE = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3, "uniqueItems": True}


@pytest.mark.parametrize("stream", [False, True])
def test_every_api_names_what_is_not_enforced(tiny_server: ServerThread, stream: bool) -> None:
    tool = {"name": "pick", "input_schema": {"type": "object", "properties": {"of": UNIQUE}, "required": ["of"]}}
    asked: dict[str, dict[str, Any]] = {
        "/v1/messages": {
            "max_tokens": 100,
            "messages": [{"role": "user", "content": "Pick."}],
            "tools": [tool],
            "tool_choice": {"type": "tool", "name": "pick"},
        },
        "/v1/responses": {
            "input": "Pick.",
            "max_output_tokens": 100,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": UNIQUE, "strict": False}},
        },
    }
    for path, fields in asked.items():
        answer = tiny_server.http.post(path, json={"model": "tiny", "stream": stream, **fields})
        assert answer.status_code == 200, (path, answer.text)
        assert answer.headers.get("X-Cardan-Unenforced") == "uniqueItems", path
    asked["/v1/responses"]["text"]["format"]["strict"] = True
    del asked["/v1/messages"]
    asked["/api/chat"] = {"messages": [{"role": "user", "content": "Pick."}], "format": UNIQUE}
    asked["/api/generate"] = {"prompt": "Pick.", "format": UNIQUE}
    for path, fields in asked.items():
        refused = tiny_server.http.post(path, json={"model": "tiny", "stream": stream, **fields})
        assert refused.status_code == 400, path
        assert "uniqueItems (at /uniqueItems)" in refused.text
