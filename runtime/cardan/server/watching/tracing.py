"""Traces of requests for OpenTelemetry: one span per HTTP request, and below it queue, prefill and decode per choice.

OpenTelemetry's SDK comes with the extra ``otel`` and is imported only when a collector is named. A caller's
``traceparent`` header is taken up, so that the spans join its trace.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cardan import __version__
from cardan.engine.api import GenerateOutput, GenerateRequest
from cardan.errors import ConfigError
from cardan.server.http.auth import OPEN_PATHS

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

UNTRACED = OPEN_PATHS | {"/metrics"}
"""Routes that are asked every few seconds, by machines."""


def traces_url(endpoint: str) -> str:
    """Where spans are posted: the endpoint, with OTLP's own path where it has none.

    Raises:
        ConfigError: it is no URL of HTTP.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"--otlp-traces-endpoint must be a URL such as http://127.0.0.1:4318 (OTLP over HTTP), got {endpoint!r}."
        )
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


class Tracing:
    """Makes spans and sends them in the background. A collector that is away costs spans, never a request."""

    def __init__(self, endpoint: str, *, exporter: SpanExporter | None = None) -> None:
        """Send to ``endpoint``, or to an exporter of the caller's.

        Raises:
            ConfigError: the endpoint is no URL, or the extra ``otel`` is not installed.
        """
        url = traces_url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry. Run: pip install 'cardan[otel]'") from None
        resource = Resource.create({"service.name": "cardan", "service.version": __version__})
        self._provider: TracerProvider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=url)))
        self.tracer: Tracer = self._provider.get_tracer("cardan.server")

    def watch(self, requests: Sequence[GenerateRequest]) -> _ChoiceSpans:
        """Follow the choices of one HTTP request."""
        return _ChoiceSpans(self.tracer, requests)

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        self._provider.force_flush(3000)
        self._provider.shutdown()


class RequestSpans:
    """ASGI middleware: one span per HTTP request."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        """Stand before ``app``."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._tracer = tracing.tracer
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on, inside a span."""
        if scope["type"] != "http" or scope["path"] in UNTRACED:
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracer.start_as_current_span(
            f"{scope['method']} {scope['path'][:200]}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "url.path": scope["path"][:200]},
        )
        with span as current:

            async def traced(message: Message) -> None:
                if message["type"] == "http.response.start":
                    current.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        current.set_status(Status(StatusCode.ERROR))
                await send(message)

            await self._app(scope, receive, traced)


class _ChoiceSpans:
    """The spans of the choices of one HTTP request, made when each ends: their times are known then."""

    def __init__(self, tracer: Tracer, requests: Sequence[GenerateRequest]) -> None:
        from opentelemetry import context

        self._tracer = tracer
        self._requests = requests
        self._parent = context.get_current()

    def see(self, prompt_index: int, output: GenerateOutput) -> None:
        """Take one output."""
        if output.finish_reason is None:
            return
        from opentelemetry import trace

        end_ns = time.time_ns()
        times = output.times
        start_ns = end_ns - int(times.e2e_s * 1e9)
        attributes: dict[str, Any] = {
            "gen_ai.response.id": output.rid,
            "gen_ai.usage.input_tokens": output.prompt_tokens,
            "gen_ai.usage.output_tokens": output.completion_tokens,
            "gen_ai.response.finish_reasons": [output.finish_reason.kind.value],
            "gen_ai.request.max_tokens": self._requests[prompt_index].sampling.max_new_tokens,
            "gen_ai.request.temperature": self._requests[prompt_index].sampling.temperature,
            "cardan.prompt_index": prompt_index,
            "cardan.choice": output.index,
            "cardan.cached_tokens": output.cached_tokens,
            "cardan.retractions": output.num_retractions,
        }
        span = self._tracer.start_span("generate", context=self._parent, start_time=start_ns, attributes=attributes)
        inside = trace.set_span_in_context(span, self._parent)
        first_ns = end_ns if times.first_token_s is None else start_ns + int(times.first_token_s * 1e9)
        queued_ns = min(start_ns + int(times.queue_s * 1e9), first_ns)
        for name, begin_ns, until_ns in (
            ("queue", start_ns, queued_ns),
            ("prefill", queued_ns, first_ns),
            ("decode", first_ns, end_ns),
        ):
            self._tracer.start_span(name, context=inside, start_time=begin_ns).end(until_ns)
        span.end(end_ns)

    def close(self) -> None:
        """Choices that never ended have no span of their own; the request's span says how it went."""
