"""What uvicorn leaves open: heads, their size and time and offers; who leaves behind a pipeline."""

from __future__ import annotations

import asyncio
import select
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
HEAD_TIMEOUT_S = 30.0
# While a further request waits behind one that runs nothing is read, so the end is looked for.
_LOOK_EVERY_S = 0.5

_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class _HeadTooLarge(Exception):
    pass


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with bounds on heads, which stays HTTP/1.1 whatever they offer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take whatever uvicorn passes."""
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        # Of this connection, those that may not be answered yet: the one that runs is first.
        self._open_cycles: list[RequestResponseCycle] = []
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        if self._look is not None:
            self._look.cancel()
        # uvicorn tells the newest only, which in a pipeline has not begun.
        for cycle in self._open_cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._open_cycles.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        parts = [data]
        while parts and not self.transport.is_closing():
            part = parts.pop()
            try:
                super().data_received(part)
            except httptools.HttpParserUpgrade as stop:
                if not self._is_offer():
                    return
                # The parser takes what follows for the other protocol's, also a body: Java's client
                # offers HTTP/2 with every request. Read again without the offer, it is ours.
                version = self.parser.get_http_version().encode()
                head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
                head += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
                self.parser = httptools.HttpRequestParser(self)
                rest = memoryview(part)[stop.args[0] :]
                parts += [cast("bytes", rest), b"\r\n".join([*head, b"\r\n"])]

    def _unsupported_upgrade_warning(self) -> None:
        # Called while the parser's exception, which knows where it stopped, is handled.
        raise

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._start_deadline()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._cancel_deadline()
        if self._is_offer():
            return
        super().on_headers_complete()
        self._open_cycles = [each for each in self._open_cycles if not each.response_complete]
        self._open_cycles.append(self.cycle)
        if self._look is None and len(self._open_cycles) > 1:
            self._look_for_the_end()

    def on_message_complete(self) -> None:
        if not self._is_offer():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers or ()) > MAX_HEADERS:
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()
            return
        super().send_400_response(msg)

    def _is_offer(self) -> bool:
        return self.parser.should_upgrade() and any(n == b"upgrade" for n, _ in self.headers)

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            # The parser turns this into its own error, which ends in `send_400_response`.
            raise _HeadTooLarge

    def _start_deadline(self) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _look_for_the_end(self) -> None:
        self._look = None
        if self.transport.is_closing() or not self.pipeline:
            return
        found = select.poll()
        found.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        if found.poll(0):
            self.transport.abort()
            return
        self._look = self.loop.call_later(_LOOK_EVERY_S, self._look_for_the_end)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
