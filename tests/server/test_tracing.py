"""Traces: what a collector gets, over real OTLP."""

from __future__ import annotations

import gzip
import http.server
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from server_fakes import FakeEngine

from cardan.config import ServerConfig
from cardan.errors import ConfigError
from cardan.server.watching.observers import Observers
from cardan.server.watching.tracing import traces_url


class Collector(http.server.HTTPServer):
    """Takes spans as a collector does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def spans_of(server: Any, collector: Collector) -> dict[str, list[Any]]:
    server.app.state.observers.tracing._provider.force_flush(5000)
    named: dict[str, list[Any]] = {}
    for span in collector.spans:
        named.setdefault(span.name, []).append(span)
    return named


def attributes(span: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def test_one_trace_from_the_caller_to_each_phase(start_fake: Any, collector: Collector) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_port}"
    server = start_fake(FakeEngine(delay_s=0.01), otlp_traces_endpoint=endpoint)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "n": 2}
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    server.http.get("/health")
    spans = spans_of(server, collector)
    (request,) = spans.pop("POST /v1/completions")
    assert request.parent_span_id.hex() == parent
    assert attributes(request)["http.response.status_code"] == 200
    assert {name: len(found) for name, found in spans.items()} == {"generate": 2, "queue": 2, "prefill": 2, "decode": 2}
    assert {span.trace_id.hex() for found in spans.values() for span in found} == {trace}
    for choice in spans["generate"]:
        assert choice.parent_span_id == request.span_id
        told = attributes(choice)
        assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (1, 4)
        phases = [span for name in ("queue", "prefill", "decode") for span in spans[name]]
        mine = [span for span in phases if span.parent_span_id == choice.span_id]
        assert [span.name for span in mine] == ["queue", "prefill", "decode"]
        assert mine[0].start_time_unix_nano == choice.start_time_unix_nano
        assert mine[2].end_time_unix_nano == choice.end_time_unix_nano
        for before, after in itertools.pairwise(mine):
            assert before.end_time_unix_nano == after.start_time_unix_nano


def test_streams_and_errors(start_fake: Any, collector: Collector) -> None:
    server = start_fake(otlp_traces_endpoint=f"http://127.0.0.1:{collector.server_port}/v1/traces")
    with server.http.stream("POST", "/generate", json={"text": "x", "stream": True}) as answer:
        answer.read()
    server.engine.full = True
    server.http.post("/generate", json={"text": "x"})
    spans = spans_of(server, collector)
    stream, refused = spans["POST /generate"]
    assert (attributes(stream)["http.response.status_code"], attributes(refused)["http.response.status_code"]) == (
        200,
        503,
    )
    assert (stream.status.code, refused.status.code) == (0, 2)
    (choice,) = spans["generate"]
    assert choice.parent_span_id == stream.span_id


def test_a_collector_that_is_away_costs_no_request(start_fake: Any) -> None:
    server = start_fake(otlp_traces_endpoint="http://127.0.0.1:9")
    for _ in range(3):
        assert server.http.post("/generate", json={"text": "x"}).status_code == 200


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "grpc://host:4317", "http://"])
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint must be a URL such as"):
        traces_url(endpoint)


def test_the_package_is_asked_for_where_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'cardan\[otel\]'"):
        Observers.open(ServerConfig(otlp_traces_endpoint="http://127.0.0.1:4318"))


def test_nothing_is_imported_without_an_endpoint() -> None:
    script = (
        "import sys\n"
        "from cardan.config import ServerConfig\n"
        "import cardan.server.app\n"
        "from cardan.server.watching.observers import Observers\n"
        "assert Observers.open(ServerConfig()).tracing is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
