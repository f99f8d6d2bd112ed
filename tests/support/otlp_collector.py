"""A collector of OpenTelemetry traces on this machine."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Receives traces as OTLP over HTTP; a context manager.

    Attributes:
        spans: all received spans, as protobuf messages.
        resources: the attributes of the processes that sent them.
        answers: while this event is not set, posts are not answered.
        num_posts: number of posts so far.
    """

    def __init__(self) -> None:
        """Listen on a free port."""
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.answers = threading.Event()
        self.answers.set()
        self.num_posts = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.take(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def address(self) -> str:
        """Host and port of the collector."""
        return f"127.0.0.1:{self._server.server_port}"

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        """Store the spans of a post, and answer the post."""
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        self.num_posts += 1
        self.answers.wait()
        if handler.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        for each in request.resource_spans:
            self.resources.append(attributes(each.resource))
            for scope in each.scope_spans:
                self.spans += scope.spans
        handler.send_response(200 if handler.path == "/v1/traces" else 404)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def of_trace(self, trace_id: str) -> list[Any]:
        """Return the spans of a trace, ordered by their start."""
        found = [span for span in list(self.spans) if span.trace_id.hex() == trace_id]
        return sorted(found, key=lambda span: (span.start_time_unix_nano, -span.end_time_unix_nano))

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()


def attributes(message: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource as plain values."""
    return {pair.key: _plain(pair.value) for pair in message.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(each) for each in value.array_value.values]
    return getattr(value, kind)
