"""Extends uvicorn's HTTP protocol: limits on heads, half-closed clients, bodies that come late."""

from __future__ import annotations

import asyncio
import select
import socket
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.connection_limit import ConnectionLimit
from server.event_stream import SEND_TIMEOUT_S

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
HEAD_TIMEOUT_S = 30.0
# The time for a head on a connection over the limit: such connections have few descriptors.
SPARE_HEAD_TIMEOUT_S = 3.0
# While a request is queued behind a running one, the socket is not read, so the end is polled for.
_LOOK_EVERY_S = 0.5
# A client that has half-closed is polled more often; each poll costs one system call.
_LOOK_AFTER_END_S = 0.1
# An answer may be sent before the whole body has arrived. These limits are the time and the bytes
# for the rest of the body. Without this time the close would reset the connection, and a client
# that still sends would not read its answer.
_REST_TIMEOUT_S = 1.0
_REST_BYTES = 8 * 2**20
_CODING = b"transfer-encoding"
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"

_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class _BadHead(Exception):
    """The head is refused; the parser converts this to its own error."""


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on heads; it stays HTTP/1.1 whatever a client offers."""

    def __init__(
        self,
        *args: Any,
        limit: ConnectionLimit,
        take_timeout_s: float = SEND_TIMEOUT_S,
        head_timeout_s: float = HEAD_TIMEOUT_S,
        **kwargs: Any,
    ) -> None:
        """Accept uvicorn's arguments and the limits.

        Args:
            args: passed to uvicorn.
            limit: shared by all connections.
            take_timeout_s: how long a client may leave sent data unread.
            head_timeout_s: how long a head may take to arrive.
            kwargs: passed to uvicorn.
        """
        super().__init__(*args, **kwargs)
        self._limit = limit
        self._take_timeout_s = take_timeout_s
        self._head_timeout_s = head_timeout_s
        self._is_spare = False
        self._head_bytes = 0
        self._why_bad = ""
        self._deadline: asyncio.TimerHandle | None = None
        # Requests of this connection that may still be unanswered. The running request is the
        # first.
        self._open_cycles: list[RequestResponseCycle] = []
        self._look: asyncio.TimerHandle | None = None
        # The client sends nothing more, but may still read.
        self._has_ended = False
        # Runs while the rest of a body may follow the response.
        self._rest: asyncio.TimerHandle | None = None
        self._rest_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A connection that we close stays open until the client has read the pending data. The
        # system drops a client that reads nothing, or that has vanished without closing.
        transport.get_extra_info("socket").setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * self._take_timeout_s)
        )
        self._is_spare = self._limit.add(self, len(self.connections))
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.discard(self)
        self._cancel_deadline()
        self._cancel_rest()
        if self._look is not None:
            self._look.cancel()
        # uvicorn notifies only the newest cycle, which in a pipeline has not begun.
        for cycle in self._open_cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._open_cycles.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._rest is not None:
            self._rest_bytes += len(data)
            if self._rest_bytes > _REST_BYTES:
                self.transport.abort()
                return
        parts = [data]
        while parts and not self.transport.is_closing():
            part = parts.pop()
            try:
                super().data_received(part)
            except httptools.HttpParserUpgrade as stop:
                if not self._is_offer():
                    return
                # After an upgrade offer the parser takes what follows, even a body, for the other
                # protocol. Java's client offers HTTP/2 with every request. Parsed again without the
                # offer, the request is HTTP/1.1.
                version = self.parser.get_http_version().encode()
                head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
                head += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
                self.parser = httptools.HttpRequestParser(self)
                rest = memoryview(part)[stop.args[0] :]
                parts += [cast("bytes", rest), b"\r\n".join([*head, b"\r\n"])]

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own signature
        """Keep the connection open if the client half-closed it after its whole request."""
        running = self._running()
        has_request = running is not None and not self._open_cycles[-1].more_body
        if not has_request or self.transport.get_extra_info("ssl_object") is not None:
            return False
        self._note_end()
        return True

    def _unsupported_upgrade_warning(self) -> None:
        # Called while the parser's exception, which holds the position where it stopped, is
        # handled.
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
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            # A proxy before this server might read another of the headers as the host.
            self._why_bad = "The Host header must be there exactly once."
            raise _BadHead
        codings = [value.strip().lower() for name, value in self.headers if name == _CODING]
        if codings not in ([], [b"chunked"]):
            # A coding inside, such as gzip, would not be decoded but read as the body itself.
            self._why_bad = "Transfer-Encoding must be chunked, and nothing else."
            raise _BadHead
        self.scope["state"]["is_spare_connection"] = self._is_spare
        super().on_headers_complete()
        if self._is_spare:
            self.cycle.keep_alive = False
        self._open_cycles = [each for each in self._open_cycles if not each.response_complete]
        self._open_cycles.append(self.cycle)
        if self._look is None and len(self._open_cycles) > 1:
            self._look_for_the_end()

    def on_message_complete(self) -> None:
        self._cancel_rest()
        if not self._is_offer():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        answered = [each for each in self._open_cycles if each.response_complete][-1]
        super().on_response_complete()
        if answered.more_body and not self.transport.is_closing():
            self._rest_bytes = 0
            self._rest = self.loop.call_later(_REST_TIMEOUT_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers or ()) > MAX_HEADERS:
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()
            return
        super().send_400_response(self._why_bad or msg)

    def _is_offer(self) -> bool:
        return self.parser.should_upgrade() and any(n == b"upgrade" for n, _ in self.headers)

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            # The parser converts this to its own error, which ends in `send_400_response`.
            raise _BadHead

    def _start_deadline(self) -> None:
        self._cancel_deadline()
        timeout_s = SPARE_HEAD_TIMEOUT_S if self._is_spare else self._head_timeout_s
        self._deadline = self.loop.call_later(timeout_s, self._give_up)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cancel_rest(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def _running(self) -> RequestResponseCycle | None:
        """The request in progress."""
        return next((each for each in self._open_cycles if not each.response_complete), None)

    def _note_end(self) -> None:
        """Handle a close or half-close by the client: the two look the same until data is sent.

        A client that has closed answers any data with a reset, so an interim response without
        meaning is sent. If a response has begun, its next part serves instead. HTTP/1.0 does not
        have interim responses, so a request of that version runs to its end.
        """
        if self._has_ended:
            return
        self._has_ended = True
        self._open_cycles[-1].keep_alive = False
        running = self._running()
        assert running is not None, "a request is unanswered"
        if not running.response_started and running.scope["http_version"] == "1.1":
            self.transport.write(_INTERIM)
        if self._look is not None:
            self._look.cancel()
        self._look = self.loop.call_later(_LOOK_AFTER_END_S, self._look_for_the_end)

    def _look_for_the_end(self) -> None:
        self._look = None
        if self.transport.is_closing() or self._running() is None:
            return
        if not self._has_ended and not self.pipeline:
            return
        found = select.poll()
        found.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        events = found.poll(0)
        if events and events[0][1] & (select.POLLERR | select.POLLHUP):
            self.transport.abort()
            return
        if events and not self._has_ended:
            self._note_end()
            return
        delay_s = _LOOK_AFTER_END_S if self._has_ended else _LOOK_EVERY_S
        self._look = self.loop.call_later(delay_s, self._look_for_the_end)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def cut_off(self) -> None:
        """Abort the connection immediately."""
        self.transport.abort()
