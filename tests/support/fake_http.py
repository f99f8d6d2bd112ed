"""An HTTP server that returns a test's answers and records the requests."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Asked:
    """A received request; `body` is decoded JSON, or `None`."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass
class FakeHttp:
    """The running server.

    Attributes:
        url: address of the server.
        requests: the received requests, in order.
        left: set when a client has closed a stream before its end.
    """

    url: str
    requests: list[Asked] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    def bodies(self, path: str) -> list[Any]:
        """Return the bodies of the requests to `path`."""
        return [request.body for request in self.requests if request.path == path]


# An answer is JSON, a pair of status and JSON, bytes, the pieces of a stream, or a function that
# returns one of these for a request.
Answer = Any


def sse(*events: Any, name: Callable[[Any], str] | None = None) -> list[str]:
    """Return the pieces of an event stream; each event is sent as JSON, a string as it is."""
    pieces = []
    for event in events:
        text = event if isinstance(event, str) else json.dumps(event)
        head = "" if name is None else f"event: {name(event)}\n"
        pieces.append(f"{head}data: {text}\n\n")
    return pieces


@contextlib.contextmanager
def serve(routes: Mapping[str, Answer]) -> Iterator[FakeHttp]:
    """Run the server; `routes` has an answer for each path."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            """Log nothing."""

        def _answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            asked = Asked(
                self.command, self.path, headers, json.loads(content) if content else None
            )
            server.requests.append(asked)
            found = routes.get(self.path.split("?")[0], (404, {"error": "no such route"}))
            if callable(found):
                found = found(asked)
            status, body = found if isinstance(found, tuple) else (200, found)
            if hasattr(body, "__next__") or isinstance(body, list):
                self._stream(status, body)
                return
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def _stream(self, status: int, pieces: Any) -> None:
            self.send_response(status)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            try:
                for piece in pieces:
                    raw = piece if isinstance(piece, bytes) else piece.encode()
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(raw), raw))
                    self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")
            except OSError:
                self.close_connection = True
                server.left.set()

        do_GET = do_POST = do_PUT = _answer

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    server = FakeHttp(f"http://127.0.0.1:{listener.server_address[1]}")
    thread = threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()
