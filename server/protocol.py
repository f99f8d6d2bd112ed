"""uvicorn's HTTP protocol with limits on request heads, and support for half-closed connections.

A head is the request line and the headers. A client half-closes a connection when it ends its
sending side but still reads.
"""

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
# Seconds for a head on a connection over the limit, because there are few such connections.
SPARE_HEAD_TIMEOUT_S = 3.0
# Seconds between checks whether the client has closed. They are needed while a request waits behind
# a running one, because the socket is not read then.
_LOOK_EVERY_S = 0.5
# Seconds between such checks after the client has half-closed. Each check is one system call.
_LOOK_AFTER_END_S = 0.1
# An answer may be sent before the whole body has arrived, for instance a refusal. The rest of the
# body is then read for at most this many seconds and bytes. Closing at once would reset the
# connection, and a client that still sends would not get to read the answer.
_REST_TIMEOUT_S = 1.0
_REST_BYTES = 8 * 2**20
_CODING = b"transfer-encoding"
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"

_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class _BadHead(Exception):
    """Raised to refuse a head. The HTTP parser turns this into an error of its own."""


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on heads. Offers to switch to HTTP/2 are ignored."""

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
            limit: the limit on connections, shared by all of them.
            take_timeout_s: seconds for which a client may leave sent data unread.
            head_timeout_s: seconds within which a head must arrive.
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
        # The requests of this connection that may still be without a complete answer. The first one
        # is running, the others wait.
        self._open_cycles: list[RequestResponseCycle] = []
        self._look: asyncio.TimerHandle | None = None
        # Whether the client has closed its sending side; it may still read.
        self._has_ended = False
        # The timer while the rest of a body is read after the answer.
        self._rest: asyncio.TimerHandle | None = None
        self._rest_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # After a close, the system keeps the connection until the client has read all data. With
        # this option, it drops a client that reads nothing, or that has vanished.
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
        # uvicorn notifies only the newest request, but with pipelining another one is running.
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
                # After a head that offers an upgrade, the parser stops, and takes what follows for
                # the other protocol, even the body. Java's client offers HTTP/2 with every request.
                # So the head is parsed again without the offer, as HTTP/1.1.
                version = self.parser.get_http_version().encode()
                head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
                head += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
                self.parser = httptools.HttpRequestParser(self)
                rest = memoryview(part)[stop.args[0] :]
                parts += [cast("bytes", rest), b"\r\n".join([*head, b"\r\n"])]

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own signature
        """Handle the end of the client's sending side; return whether the connection stays open."""
        running = self._running()
        has_request = running is not None and not self._open_cycles[-1].more_body
        if not has_request or self.transport.get_extra_info("ssl_object") is not None:
            return False
        self._note_end()
        return True

    def _unsupported_upgrade_warning(self) -> None:
        # uvicorn calls this while it handles the parser's exception, which is raised again because
        # it has the position where the parser stopped.
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
            # A proxy in front of this server might have taken another of the headers as the host.
            self._why_bad = "The Host header must be there exactly once."
            raise _BadHead
        codings = [value.strip().lower() for name, value in self.headers if name == _CODING]
        if codings not in ([], [b"chunked"]):
            # Another coding, such as gzip, would not be decoded but taken for the body itself.
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
            # The parser turns this into its own error, which leads to `send_400_response`.
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
        """Return the request that is running; None if all are answered."""
        return next((each for each in self._open_cycles if not each.response_complete), None)

    def _note_end(self) -> None:
        """Find out whether a client that ended its sending side has closed the whole connection.

        The two cases look the same until data is sent: a closed connection is then reset. So the
        server sends an interim response (`100 Continue`), which clients ignore. If a response has
        begun, its next part has the same effect, so no interim response is sent. HTTP/1.0 has no
        interim responses, so its requests run to their end.
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
