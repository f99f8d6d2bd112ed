"""OpenTelemetry traces: a span for each HTTP request, with a child span for each sample.

A sample is one of the `n` outputs of a request.

The spans of a sample are made from its record (`runtime.client.recorder`) when it has ended, so
running requests cost nothing. The SDK encodes and sends spans on a thread of its own, and drops
spans if the collector is slow. Which requests are traced follows the caller's `traceparent`, or
else `OTEL_TRACES_SAMPLER`.

Source: W3C Trace Context; OpenTelemetry's semantic conventions for HTTP and generative AI.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.types import Scope

from runtime.client.recorder import RequestRecord
from runtime.errors import StartupError
from runtime.requests.request_context import RequestContext

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

TRACES_PATH = "/v1/traces"
_OPTION = "--otlp-traces-endpoint"
_HEADERS = (b"traceparent", b"tracestate")
_PROVIDER = "headrace"
_CLOSE_S = 3.0
_SERVER_ERROR = 500
# The conventions' name of the operation, by the route's path; other routes complete a text.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/embeddings": "embeddings",
    "/encode": "embeddings",
    "/pooling": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
# The name of the span for each stage of a record.
_STAGES = {"prefill_waiting": "queue", "prefill_forward": "prefill", "decode_loop": "decode"}
_AttributeValue = str | int | float | list[str]


def traces_url(endpoint: str) -> str:
    """Return the URL to which spans are posted.

    Args:
        endpoint: `http://host:port/path`. Without a scheme, plain HTTP is used. Without a path,
            OTLP's usual path is used.

    Raises:
        StartupError: `endpoint` is not such an address.
    """
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    try:
        parts = urlsplit(url)
        is_wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:
        is_wrong = True
    if is_wrong or any(not char.isprintable() or char.isspace() for char in url):
        raise StartupError(
            f"{_OPTION} {endpoint!r} is not an address like http://localhost:4318 (OTLP over HTTP)."
        )
    return parts._replace(path=TRACES_PATH).geturl() if parts.path in ("", "/") else url


def check_tracing(endpoint: str | None) -> None:
    """Check the option for traces before anything slow begins.

    Raises:
        StartupError: the address is malformed, or the extra `otel` is not installed.
    """
    if endpoint is None:
        return
    traces_url(endpoint)
    # Parents are checked first: `find_spec` raises if the parent of a package is missing.
    for name in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter"):
        if importlib.util.find_spec(name) is None:
            raise StartupError(f"{_OPTION} needs the extra otel: pip install 'headrace[otel]'.")


class Tracing:
    """Makes the spans of requests and passes them to OpenTelemetry's SDK."""

    def __init__(self, endpoint: str, model_name: str, version: str) -> None:
        """Prepare to send spans to `endpoint`, the address of an OTLP collector.

        The SDK also reads its environment variables (`OTEL_EXPORTER_OTLP_HEADERS`,
        `OTEL_TRACES_SAMPLER`, `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_BSP_...`).
        """
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ours = Resource({"service.name": _PROVIDER, "service.version": version})
        self._provider = TracerProvider(
            resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=traces_url(endpoint))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("headrace", version)
        self._propagator = TraceContextTextMapPropagator()
        self._api = trace
        self._model_name = model_name
        # Spans of running requests, by span id, because a `RequestContext` has only plain data.
        self._open: dict[str, Span] = {}

    def begin(self, scope: Scope, route: str, request_id: str) -> RequestContext:
        """Begin the span of an HTTP request to the path `route`, and return the context."""
        method = scope["method"]
        span = self._tracer.start_span(
            f"{method} {route}",
            context=self._caller(scope),
            kind=self._api.SpanKind.SERVER,
            attributes={
                "http.request.method": method,
                "http.route": route,
                "url.path": scope["path"],
                "headrace.request_id": request_id,
            },
        )
        ids = span.get_span_context()
        context = RequestContext(
            request_id,
            self._api.format_trace_id(ids.trace_id),
            self._api.format_span_id(ids.span_id),
            is_sampled=ids.trace_flags.sampled,
            route=route,
        )
        if context.is_sampled:
            self._open[context.span_id] = span
        return context

    def _caller(self, scope: Scope) -> Context:
        carrier: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            if name in _HEADERS:
                carrier.setdefault(name.decode(), []).append(value.decode("latin-1"))
        # As the standard requires, a malformed header is ignored, and a new trace begins.
        return self._propagator.extract(carrier)

    def end(self, context: RequestContext, status_code: int) -> None:
        """End the span that `begin` has begun."""
        span = self._open.pop(context.span_id, None)
        if span is None:
            return
        span.set_attribute("http.response.status_code", status_code)
        if status_code >= _SERVER_ERROR:
            span.set_attribute("error.type", str(status_code))
            span.set_status(self._api.StatusCode.ERROR)
        span.end()

    def on_record(self, record: RequestRecord) -> None:
        """Make the spans of a sample that has ended."""
        context = record.context
        if context is None or not context.is_sampled:
            return
        offset_s = time.time() - time.monotonic()
        operation = _OPERATIONS.get(context.route, "text_completion")
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=self._below(context),
            start_time=_nanoseconds(record.started_at + offset_s),
            attributes={"gen_ai.operation.name": operation, **self._attributes(record)},
        )
        below = self._api.set_span_in_context(span)
        start_s = record.started_at + offset_s
        for stage, stage_s in record.stages().items():
            child = self._tracer.start_span(
                _STAGES[stage], context=below, start_time=_nanoseconds(start_s)
            )
            start_s += stage_s
            child.end(_nanoseconds(start_s))
        if record.outcome == "error":
            span.set_status(self._api.StatusCode.ERROR)
        span.end(_nanoseconds(record.ended_at + offset_s))

    def _below(self, context: RequestContext) -> Context:
        # The span is named by its ids only, because the HTTP request may have ended before its
        # sample, as in background responses.
        ids = self._api.SpanContext(
            int(context.trace_id, 16),
            int(context.span_id, 16),
            is_remote=False,
            trace_flags=self._api.TraceFlags(self._api.TraceFlags.SAMPLED),
        )
        return self._api.set_span_in_context(self._api.NonRecordingSpan(ids))

    def _attributes(self, record: RequestRecord) -> Mapping[str, _AttributeValue]:
        sampling = record.sampling
        found: dict[str, _AttributeValue | None] = {
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.id": record.rid,
            "gen_ai.response.finish_reasons": [record.outcome],
            "gen_ai.request.max_tokens": sampling.max_new_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k if sampling.top_k > 0 else None,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
            "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            # These names are not in the conventions; SGLang and vLLM use them.
            "gen_ai.latency.e2e": record.e2e_s,
            "gen_ai.latency.time_to_first_token": record.ttft_s,
            "gen_ai.latency.time_in_queue": record.stages().get("prefill_waiting"),
        }
        return {name: value for name, value in found.items() if value is not None}

    def close(self) -> None:
        """Send the spans that are still queued; wait a few seconds at most."""
        # The SDK would wait for a collector that does not answer, so it does so on a thread that
        # need not end.
        thread = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def trace_response(context: RequestContext) -> bytes:
    """Return the value of the header `traceresponse`, with which a caller finds its spans."""
    flags = "01" if context.is_sampled else "00"
    return f"00-{context.trace_id}-{context.span_id}-{flags}".encode("ascii")
