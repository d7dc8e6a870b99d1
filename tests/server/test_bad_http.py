"""Bodies, paths and methods that are wrong: a clear status, never a 500, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_fakes import FakeEngine, ServerThread, server_config

from cardan.server import create_app
from cardan.server.native.generate import GenerateBody
from cardan.server.openai.bodies import CHAT_REFUSED, COMPLETION_REFUSED, ChatBody, CompletionBody
from cardan.types import SamplingParams

ROUTES = ["/generate", "/v1/chat/completions", "/v1/completions", "/abort_request", "/tokenize", "/detokenize"]

BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "blank": (b"  \n", "is empty"),
    "truncated": (b'{"text": "a"', "not valid JSON"),
    "words": (b"hello", "not valid JSON"),
    "trailing": (b'{"text": "a"} x', "not valid JSON"),
    "array": (b"[1, 2]", "must be a JSON object, got an array"),
    "string": (b'"x"', "must be a JSON object, got a string"),
    "null": (b"null", "must be a JSON object, got null"),
    "number": (b"5", "must be a JSON object, got a number"),
    "true": (b"true", "must be a JSON object, got a boolean"),
    "nan": (b'{"text": "a", "sampling_params": {"temperature": NaN}}', "not valid JSON"),
    "infinity": (b'{"text": "a", "sampling_params": {"temperature": Infinity}}', "not valid JSON"),
    "huge-float": (b'{"text": "a", "sampling_params": {"temperature": 1e400}}', "not valid JSON"),
    "huge-int": (b'{"text": "a", "sampling_params": {"seed": 1' + b"0" * 5000 + b"}}", "not valid JSON"),
    "deep-array": (b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
    "deep-object": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    "utf8": (b'{"text": "\xff\xfe"}', "not valid JSON"),
    "utf8-key": (b'{"\xff": "a"}', "not valid JSON"),
    "utf16": ('{"text": "a"}'.encode("utf-16"), "not valid JSON"),
    "surrogate": (b'{"text": "\\ud800"}', "not valid JSON"),
    "encoded-surrogate": (b'{"text": "\xed\xa0\x80"}', "not valid JSON"),
}


def assert_serves(client: httpx.Client) -> None:
    response = client.post("/generate", json={"text": "still here", "sampling_params": {"max_new_tokens": 2}})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", BROKEN)
def test_broken_bodies(client: httpx.Client, name: str) -> None:
    data, message = BROKEN[name]
    for route in ROUTES[:3]:
        response = client.post(route, content=data)
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]
        assert response.json()["error"]["code"] == "invalid_json"
    assert_serves(client)


def test_any_content_type_is_taken_when_it_parses(client: httpx.Client) -> None:
    body = json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 1}})
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert client.post("/generate", content=body, headers={"Content-Type": kind}).status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_unknown_fields_are_named(client: httpx.Client, route: str) -> None:
    response = client.post(route, json={"no_such_field_anywhere": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "no_such_field_anywhere"
    assert response.json()["error"]["code"] == "unknown_parameter"


def test_query_parameters_are_refused(client: httpx.Client) -> None:
    response = client.post("/flush_cache?timeout=5")
    assert response.status_code == 400
    assert "takes no query parameters, got 'timeout'" in response.json()["error"]["message"]


def test_unknown_routes_and_methods(client: httpx.Client) -> None:
    response = client.get("/v2/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "There is no route '/v2/nothing'."
    for method, path in (("GET", "/generate"), ("POST", "/health"), ("DELETE", "/v1/models")):
        response = client.request(method, path)
        assert response.status_code == 405
        assert "does not take" in response.json()["error"]["message"]
        assert response.headers["allow"]
    assert client.get("/v1/models/").status_code == 404


def test_body_over_the_limit(client: httpx.Client) -> None:
    body = b'{"text": "' + b"x" * (10 * 2**20) + b'"}'
    response = client.post("/generate", content=body)
    assert response.status_code == 413
    assert "--max-body-bytes" in response.json()["error"]["message"]

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 2**16):
            yield body[start : start + 2**16]

    # Without a content length the limit is met while reading; the server may hang up before all is sent.
    with contextlib.suppress(httpx.TransportError):
        assert client.post("/generate", content=pieces()).status_code == 413
    assert_serves(client)


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("/generate", "text", "word " * 500_000),
        ("/v1/completions", "prompt", ["x", "word " * 500_000]),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "word " * 500_000}]),
    ],
)
def test_text_that_cannot_fit_is_not_tokenized(client: httpx.Client, path: str, name: str, value: Any) -> None:
    response = client.post(path, json={name: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == name
    assert "a token of this model has at most" in error["message"]
    assert_serves(client)


def test_ids_that_cannot_fit_are_not_looked_at(client: httpx.Client) -> None:
    for route, name in (("/v1/completions", "prompt"), ("/generate", "input_ids")):
        response = client.post(route, json={name: [1] * 500_000 + [10**9]})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "500001 token" in response.json()["error"]["message"]
    assert_serves(client)


def test_text_that_is_too_long_by_its_tokens(client: httpx.Client) -> None:
    context = client.get("/v1/models").json()["data"][0]["max_model_len"]
    response = client.post("/generate", json={"text": "word " * context})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert_serves(client)


def test_catastrophic_stop_regex_is_harmless(client: httpx.Client) -> None:
    params = {"max_new_tokens": 64, "ignore_eos": True, "stop_regex": ["(a+)+$", "(x|x)*y", "(.*)*\\d{3}z"]}
    assert client.post("/generate", json={"text": "a" * 40, "sampling_params": params}).status_code == 200


def test_backreference_in_a_stop_regex(client: httpx.Client) -> None:
    response = client.post("/generate", json={"text": "a", "sampling_params": {"stop_regex": "(a)\\1"}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop_regex"


def test_garbage_that_is_not_http(server: ServerThread) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
    assert_serves(server.http)


def raw(server: ServerThread, data: bytes) -> bytes:
    """What a server answers to bytes on a connection of their own."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(data)
        answer = b""
        while more := sock.recv(65536):
            answer += more
    return answer


@pytest.mark.parametrize("host", [b"[", b"a/b", b"a?b#c", b"", b"a:b:c", b"user@[::1]x"])
def test_what_a_client_calls_the_host_changes_nothing(server: ServerThread, host: bytes) -> None:
    end = b" HTTP/1.1\r\nConnection: close\r\nHost: " + host + b"\r\n"
    assert raw(server, b"GET /page/page.css" + end + b"\r\n").startswith(b"HTTP/1.1 200")
    missing = raw(server, b"GET /nothing" + end + b"\r\n")
    assert missing.startswith(b"HTTP/1.1 404")
    assert b"There is no route '/nothing'." in missing
    wrong = raw(server, b"POST /v1/messages" + end + b"Content-Length: 1\r\n\r\n[")
    assert wrong.startswith(b"HTTP/1.1 400")
    assert b'"type":"error"' in wrong, "the error has the form of the route's API"


def test_requests_of_one_connection_are_answered_in_order(server: ServerThread) -> None:
    """Pipelined: all are sent before the first is answered."""
    bodies = [b'{"text": "%d"}' % number for number in range(4)]
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
    sent = b"".join(head % len(body) + b"\r\n" + body for body in bodies[:-1])
    answer = raw(server, sent + head % len(bodies[-1]) + b"Connection: close\r\n\r\n" + bodies[-1])
    tokens = [json.loads(part.split(b"\r\n\r\n")[1])["tokens"] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
    expected = [server.http.post("/tokenize", content=body).json()["tokens"] for body in bodies]
    assert tokens == expected


def test_compressed_bodies_are_refused(client: httpx.Client) -> None:
    body = gzip.compress(b'{"text": "a"}' + b" " * 10_000_000)
    for route in ("/generate", "/v1/messages", "/api/generate"):
        response = client.post(route, content=body, headers={"Content-Encoding": "gzip"})
        assert response.status_code == 415
        assert "Content-Encoding 'gzip'" in str(response.json()["error"])
    plain = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    assert client.post("/generate", json=plain, headers={"Content-Encoding": "identity"}).status_code == 200


WRONG_IN_MILLIONS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"input": "x"}, "include"),
    ("/v1/embeddings", {}, "input"),
    ("/api/embed", {"model": "tiny"}, "input"),
    ("/v1/score", {"query": "x", "label_token_ids": [1]}, "items"),
    ("/v1/score", {"query": "x", "items": ["y"]}, "label_token_ids"),
    ("/v1/completions", {"prompt": "x"}, "stop"),
    ("/v1/completions", {"prompt": "x"}, "temperature"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "tool_choice"),
]


@pytest.mark.parametrize(("route", "body", "name"), WRONG_IN_MILLIONS)
def test_millions_of_wrong_values_cost_no_more_than_reading_them(
    client: httpx.Client, route: str, body: dict[str, Any], name: str
) -> None:
    data = json.dumps({**body, name: []}).encode().replace(b"[]", b"[" + b"null," * 700_000 + b"null]", 1)
    started_s = time.monotonic()
    response = client.post(route, content=data)
    assert response.status_code == 400, response.text
    assert len(response.text) < 1000
    assert time.monotonic() - started_s < 5


_TEXT = {"type": "text", "text": "x"}
_USER = {"role": "user", "content": "x"}
_USES = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
_RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [_TEXT] * 100_000}
_CLAUDE: dict[str, Any] = {"max_tokens": 2, "tools": [{"name": "f", "input_schema": {}}], "messages": [_USER]}
_CALLS = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 50_000}
MANY_PIECES: dict[str, tuple[str, dict[str, Any], str]] = {
    "results": (
        "/v1/messages",
        {**_CLAUDE, "messages": [_USER, _USES, {"role": "user", "content": [_RESULT]}]},
        "16384",
    ),
    "system": ("/v1/messages", {**_CLAUDE, "system": [_TEXT] * 100_000}, "16384"),
    "tools": (
        "/v1/messages",
        {**_CLAUDE, "tools": [{"name": "f", "input_schema": {}}] * 100_000},
        "at most 1024 tools",
    ),
    "items": ("/v1/responses", {"input": [_USER] * 100_000}, "parts of messages, got more than 16384"),
    "outputs": (
        "/v1/responses",
        {"input": [_USER, {"type": "function_call_output", "call_id": "a", "output": [_TEXT] * 100_000}]},
        "'input' may hold at most 16384",
    ),
    "ollama": ("/api/chat", {"model": "tiny", "messages": [_USER] * 100_000}, "16384"),
    "calls": ("/api/chat", {"model": "tiny", "messages": [_USER, _CALLS, _USER]}, "at most 1024 calls, got 50000"),
}


@pytest.mark.parametrize("name", MANY_PIECES)
def test_pieces_beyond_any_context_are_counted_and_not_read(client: httpx.Client, name: str) -> None:
    route, body, message = MANY_PIECES[name]
    response = client.post(route, json=body)
    assert response.status_code == 400
    assert message in str(response.json()["error"])


def test_a_million_labels(client: httpx.Client) -> None:
    labels = ",".join(f'"{number}": {number}' for number in range(200_000))
    response = client.post("/v1/responses", content='{"input": "x", "metadata": {' + labels + "}}")
    assert response.status_code == 400
    assert "may have at most 16 entries" in response.json()["error"]["message"]


def test_huge_wrong_values_are_not_repeated(client: httpx.Client) -> None:
    response = client.post("/generate", json={"text": ["x"], "rid": "r", "priority": "x" * 100_000})
    assert response.status_code == 400
    assert len(response.text) < 3000


NUMBERS_BEYOND_ANY_FLOAT = [
    ("/generate", '{"text": "a", "sampling_params": {"%s": @}}', name)
    for name in ("temperature", "top_k", "seed", "n", "max_new_tokens", "min_p")
] + [
    ("/generate", '{"text": "a", "return_logprob": true, "%s": @}', name)
    for name in ("logprob_start_len", "top_logprobs_num", "priority")
]


@pytest.mark.parametrize(("route", "body", "name"), NUMBERS_BEYOND_ANY_FLOAT)
def test_whole_numbers_beyond_any_float(client: httpx.Client, route: str, body: str, name: str) -> None:
    for number in ("1" + "0" * 400, "-1" + "0" * 400):
        response = client.post(route, content=(body % name).replace("@", number))
        assert response.status_code == 400, response.text
    assert_serves(client)


def test_a_number_of_choices_that_would_not_fit_in_memory(client: httpx.Client) -> None:
    response = client.post("/generate", json={"text": "a", "sampling_params": {"n": 10**9}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"
    assert_serves(client)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generate", {"text": ["a"] * 100, "sampling_params": {"n": 41}}),
        ("/generate", {"text": ["a"] * 100, "sampling_params": [{"n": 41}] * 100}),
        ("/v1/completions", {"prompt": ["a"] * 100, "n": 41}),
    ],
)
def test_too_many_choices_in_all(client: httpx.Client, route: str, body: dict[str, Any]) -> None:
    response = client.post(route, json=body)
    assert response.status_code == 400
    assert "100 prompts ask for 4100 choices in all" in response.json()["error"]["message"]
    assert_serves(client)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x"}] * 20_000,
        [{"role": "user", "content": [{"type": "text", "text": "x"}] * 20_000}],
    ],
    ids=["messages", "parts"],
)
def test_a_conversation_of_many_pieces_holds_up_nobody(client: httpx.Client, messages: list[Any]) -> None:
    """Reading that many takes a while; no probe meanwhile waits for most of it."""
    done = threading.Event()
    probe_s: list[float] = []

    def talk() -> None:
        client.post("/v1/chat/completions", json={"messages": messages})
        done.set()

    with httpx.Client(base_url=client.base_url, timeout=30) as prober:
        prober.get("/health")
        thread = threading.Thread(target=talk)
        started_s = time.monotonic()
        thread.start()
        while not done.is_set():
            asked_s = time.monotonic()
            assert prober.get("/health").status_code == 200
            probe_s.append(time.monotonic() - asked_s)
        talk_s = time.monotonic() - started_s
        thread.join()
    assert max(probe_s) < 0.6 * talk_s


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["x", 0, 1, -1, 65, "65", "user", "text", [65], ["x"], {}, []]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NATIVE_FIELDS = [*GenerateBody.model_fields, "image_data", "lora_path"]
SAMPLING_FIELDS = [*(field.name for field in dataclasses.fields(SamplingParams)), "regex", "sampling_seed"]
OPENAI_FIELDS = [*ChatBody.model_fields, *CompletionBody.model_fields, *CHAT_REFUSED, *COMPLETION_REFUSED]
BASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/generate": ({"text": "x", "sampling_params": {"max_new_tokens": 2}}, NATIVE_FIELDS),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
        OPENAI_FIELDS,
    ),
    "/v1/completions": ({"prompt": "x", "max_tokens": 2}, OPENAI_FIELDS),
    "/tokenize": ({"text": "x"}, ["text", "prompt", "add_special_tokens", "model"]),
    "/detokenize": ({"tokens": [65]}, ["tokens", "skip_special_tokens", "model"]),
    "/abort_request": ({"rid": "x"}, ["rid", "abort_all"]),
}


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    route = draw(st.sampled_from(sorted(BASES)))
    base, fields = BASES[route]
    body = dict(base)
    for name in draw(st.lists(st.sampled_from(fields), max_size=3)):
        body[name] = draw(VALUES)
    if route == "/generate" and draw(st.booleans()):
        names = draw(st.lists(st.sampled_from(SAMPLING_FIELDS), max_size=3))
        body["sampling_params"] = {"max_new_tokens": 2} | {name: draw(VALUES) for name in names}
    for name in draw(st.lists(st.sampled_from(sorted(body)), max_size=1)):
        del body[name]
    return route, body


@pytest.fixture(scope="module")
def in_process() -> Iterator[Any]:
    """Posts to an application in this thread, without sockets; what the application raises comes up here."""
    loop = asyncio.new_event_loop()
    engine = FakeEngine()
    app = create_app(engine, server_config())
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", verify=False)

    def post(route: str, **kwargs: Any) -> httpx.Response:
        response = loop.run_until_complete(client.post(route, **kwargs))
        assert not engine.open
        return response

    yield post
    loop.run_until_complete(client.aclose())
    loop.close()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated())
def test_mutated_bodies_never_give_a_500(in_process: Any, case: tuple[str, dict[str, Any]]) -> None:
    route, body = case
    response = in_process(route, json=body)
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(BASES)), st.binary(max_size=40), st.integers(0, 60), st.integers(0, 40))
def test_mutated_bytes_never_give_a_500(in_process: Any, route: str, noise: bytes, at: int, cut: int) -> None:
    data = json.dumps(BASES[route][0]).encode()
    response = in_process(route, content=data[:at] + noise + data[at + cut :])
    assert response.status_code in (200, 400, 404), response.text
