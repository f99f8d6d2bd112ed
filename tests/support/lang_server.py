"""A server for tests of the frontend language: records requests, and answers with a function."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], Any]


def meta(text: str, prompt: str = "") -> dict[str, Any]:
    return {
        "id": "stub",
        "prompt_tokens": len(prompt.split()),
        "completion_tokens": len(text.split()),
        "cached_tokens": 0,
        "finish_reason": {"type": "stop"},
    }


class Recorded:
    """A received request, with the times of its beginning and its end."""

    def __init__(self, method: str, path: str, headers: Any, body: Any) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body
        self.began = time.monotonic()
        self.ended: float | None = None
        self.was_aborted = threading.Event()


class LangServer:
    """Serves `/generate` and the other routes that a `RuntimeEndpoint` uses; a context manager.

    Attributes:
        requests: the received requests, in order.
        answer: returns the answer to a request: a text, a list of texts, or a pair of status and
            body. If it raises an exception, the connection is closed.
        delay_s: delay before each generation, seconds.
        piece_chars: number of characters that each streamed event adds.
    """

    def __init__(self, model_path: str = "Qwen/Qwen2.5-7B-Instruct") -> None:
        self.requests: list[Recorded] = []
        self.answer: Answer = lambda payload: " stub"
        self.delay_s = 0.0
        self.piece_chars = 2
        self.model_info: dict[str, Any] = {"model_path": model_path}
        self.hold = threading.Event()
        self.hold.set()
        self.lock = threading.Lock()
        self.num_open = 0
        self.most_open = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                outer.record(self, None)
                if self.path in ("/get_model_info", "/model_info"):
                    outer.reply(self, 200, outer.model_info)
                elif self.path in ("/get_server_info", "/server_info"):
                    outer.reply(self, 200, {"version": "stub"})
                else:
                    outer.reply(self, 404, {"error": {"message": "no such route"}})

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("content-length", 0)))
                recorded = outer.record(self, json.loads(data) if data else None)
                if self.path == "/generate":
                    outer.generate(self, recorded)
                elif self.path == "/flush_cache":
                    outer.reply(self, 200, {})
                else:
                    outer.reply(self, 404, {"error": {"message": "no such route"}})

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 1024

            def handle_error(self, *_: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    @property
    def generations(self) -> list[Recorded]:
        return [request for request in self.requests if request.path == "/generate"]

    @property
    def payloads(self) -> list[dict[str, Any]]:
        return [request.body for request in self.generations]

    @property
    def texts(self) -> list[Any]:
        return [payload["text"] for payload in self.payloads if "text" in payload]

    def close(self) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> LangServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- answering ----

    def record(self, handler: BaseHTTPRequestHandler, body: Any) -> Recorded:
        recorded = Recorded(handler.command, handler.path, handler.headers, body)
        with self.lock:
            self.requests.append(recorded)
        return recorded

    def reply(self, handler: BaseHTTPRequestHandler, status: int, body: Any) -> None:
        is_text = isinstance(body, str)
        data = body.encode() if is_text else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("content-type", "text/html" if is_text else "application/json")
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def generate(self, handler: BaseHTTPRequestHandler, recorded: Recorded) -> None:
        with self.lock:
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
        try:
            if self.delay_s:
                threading.Event().wait(self.delay_s)
            self.hold.wait(60)
            self._answer(handler, recorded)
        finally:
            with self.lock:
                self.num_open -= 1
            recorded.ended = time.monotonic()

    def _answer(self, handler: BaseHTTPRequestHandler, recorded: Recorded) -> None:
        payload = recorded.body
        if payload["sampling_params"].get("max_new_tokens") == 0 and not payload.get(
            "return_logprob"
        ):
            self.reply(handler, 200, {"text": "", "meta_info": meta("", str(payload["text"]))})
            return
        try:
            answer = self.answer(payload)
        except ConnectionError:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        if isinstance(answer, tuple):
            self.reply(handler, *answer)
        elif payload.get("stream"):
            self._stream(handler, recorded, answer)
        elif isinstance(answer, (list, dict)) and payload.get("return_logprob"):
            self.reply(handler, 200, answer)
        elif isinstance(answer, list):
            body = [{"text": one, "meta_info": meta(one)} for one in answer]
            self.reply(handler, 200, body)
        else:
            body = {"text": answer, "meta_info": meta(answer, payload["text"])}
            self.reply(handler, 200, body)

    def _stream(self, handler: BaseHTTPRequestHandler, recorded: Recorded, answer: Any) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("connection", "close")
        handler.end_headers()
        handler.close_connection = True
        events = answer if isinstance(answer, list) else self.events_of(answer)
        try:
            for event in events:
                if callable(event):
                    event()
                    continue
                data = event if isinstance(event, bytes) else json.dumps(event).encode()
                handler.wfile.write(b"data: " + data + b"\n\n")
        except ConnectionResetError:
            handler.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            recorded.was_aborted.set()

    def events_of(self, text: str) -> list[Any]:
        events: list[Any] = []
        for count, end in enumerate(range(0, len(text) + self.piece_chars, self.piece_chars)):
            so_far = text[: max(end, 1)]
            events.append(
                {"text": so_far, "meta_info": {"id": "stub", "completion_tokens": count + 1}}
            )
        return [*events, b"[DONE]"]
