"""A small HTTP/1.1 client for server-sent events, with a pool of connections.

A general HTTP client takes more time per event than a fast server does, so it cannot measure the
server. This client takes a few microseconds per event, so one process can read tens of thousands of
events per second.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

from runtime.errors import HeadraceError, StartupError

OnEvent = Callable[[float, bytes], None]
_OK = 200
_LENGTH_HEADERS = (b"content-length", b"transfer-encoding")
_MAX_ERROR_BYTES = 65536
_UNLIMITED = contextlib.nullcontext()


class HttpStatusError(HeadraceError):
    """A response with a status other than 200.

    Attributes:
        status: the response's status.
        body: the beginning of the response.
    """

    def __init__(self, status: int, body: bytes) -> None:
        """Store the status and the body."""
        text = " ".join(body.decode(errors="replace").split())
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status = status
        self.body = body


class _Exchange:
    """The state of one response while it arrives: status, body and the callback for its events."""

    def __init__(self, on_event: OnEvent | None, done: asyncio.Future[None]) -> None:
        self.on_event = on_event
        self.done = done
        self.status = 0
        self.has_length = False
        self.body = bytearray()
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Add a piece of the body, and call the callback for each complete event.

        The callback gets the data of the event, without the prefix `data: `.
        """
        if self.on_event is None or self.status != _OK:
            if self.on_event is None or len(self.body) < _MAX_ERROR_BYTES:
                self.body += data
            return
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                self.on_event(now, event[5:].removeprefix(b" "))


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport | None = None
        self.exchange: _Exchange | None = None
        self.reusable = True
        self._now = 0.0

    # ---- asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self.parser.feed_data(data)
        except Exception as error:
            # An exception of the event callback arrives here too. It must fail only this request,
            # and not reach the event loop.
            self.fail(HeadraceError(f"The answer cannot be read: {error.__context__ or error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        exchange = self.exchange
        if exc is None and exchange is not None and exchange.status and not exchange.has_length:
            # A response without a stated length ends when its connection is closed.
            self.on_message_complete()
            return
        self.fail(exc or ConnectionResetError("The server closed the connection."))

    # ---- httptools ----

    def on_header(self, name: bytes, _: bytes) -> None:
        if self.exchange is not None and name.lower() in _LENGTH_HEADERS:
            self.exchange.has_length = True

    def on_headers_complete(self) -> None:
        if self.exchange is not None:
            self.exchange.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self.exchange is not None:
            self.exchange.feed(data, self._now)

    def on_message_complete(self) -> None:
        self.reusable = self.reusable and bool(self.parser.should_keep_alive())
        exchange, self.exchange = self.exchange, None
        if exchange is not None and not exchange.done.done():
            exchange.done.set_result(None)

    # ---- methods of this class only ----

    def fail(self, error: BaseException) -> None:
        """End the request in progress with `error`."""
        self.reusable = False
        exchange, self.exchange = self.exchange, None
        if exchange is not None and not exchange.done.done():
            exchange.done.set_exception(error)

    def close(self) -> None:
        self.reusable = False
        if self.transport is not None:
            self.transport.close()

    @property
    def is_open(self) -> bool:
        return self.reusable and self.transport is not None and not self.transport.is_closing()


class HttpClient:
    """An HTTP client for one server; each concurrent request has its own pooled connection."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        timeout_s: float | None,
        *,
        tls: ssl.SSLContext | None = None,
        max_connections: int | None = None,
    ) -> None:
        """Store the address; no connection is opened yet.

        Args:
            url: scheme, host, port and optionally a prefix for every path. A trailing `/v1`, as in
                OpenAI's clients, is dropped, because our paths include it.
            headers: sent with every request.
            timeout_s: the longest time for a request, its whole stream included; None for no limit.
            tls: TLS settings for an https server; by default those of the machine.
            max_connections: most requests at a time; further requests wait. None for no limit.

        Raises:
            StartupError: `url` or a header is invalid.
        """
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise StartupError(f"{url} is not a URL: {error}.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartupError(f"{url} is not an http or https URL.")
        is_secure = parts.scheme == "https"
        self._ssl = (tls or ssl.create_default_context()) if is_secure else None
        self._host = parts.hostname
        self._port = port or (443 if self._ssl else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        fields = {"Host": parts.netloc.rpartition("@")[2], "Connection": "keep-alive"}
        fields |= {"Content-Type": "application/json", **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        if any(c in value for value in fields.values() for c in "\r\n"):
            raise StartupError("A header may not hold a line break.")
        self._headers = lines.encode()
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(max_connections) if max_connections else None
        self._idle: list[_Connection] = []

    async def connect(self) -> None:
        """Open a connection for the first request.

        Raises:
            OSError: the server does not answer.
            TimeoutError: the server does not answer in time.
        """
        async with asyncio.timeout(self._timeout_s):
            self._idle.append(await self._connect())

    async def stream(self, path: str, body: bytes, on_event: OnEvent) -> None:
        """Send a POST request and read its response as server-sent events.

        `on_event(when, data)` is called for each event; `when` is the time of its arrival in
        seconds of `time.perf_counter()`.

        Raises:
            HttpStatusError: the status is not 200; the error holds the beginning of the response.
            OSError: the connection broke.
            TimeoutError: the answer took too long.
        """
        exchange = await self._exchange("POST", path, body, on_event)
        if exchange.status != _OK:
            raise HttpStatusError(exchange.status, bytes(exchange.body))

    async def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Send one request without a stream, and return the status and body of its response.

        Raises:
            OSError: the connection broke.
            TimeoutError: the answer took too long.
        """
        exchange = await self._exchange(method, path, body, None)
        return exchange.status, bytes(exchange.body)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(
        self, method: str, path: str, body: bytes, on_event: OnEvent | None
    ) -> _Exchange:
        head = f"{method} {self._base}{path} HTTP/1.1\r\n".encode()
        request = head + self._headers + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
        # The request waits here for a free connection, of at most `max_connections`.
        limit = _UNLIMITED if self._timeout_s is None else asyncio.timeout(self._timeout_s)
        async with self._room or _UNLIMITED, limit:
            while True:
                connection = self._take_idle()
                is_reused = connection is not None
                if connection is None:
                    connection = await self._connect()
                done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                exchange = _Exchange(on_event, done)
                try:
                    await self._talk(connection, exchange, request)
                except OSError:
                    # The server may have closed an idle connection just when it was taken from the
                    # pool. Then the request is sent again on another connection.
                    if is_reused and not exchange.status:
                        continue
                    raise
                return exchange

    async def _talk(self, connection: _Connection, exchange: _Exchange, request: bytes) -> None:
        assert connection.transport is not None
        connection.exchange = exchange
        try:
            connection.transport.write(request)
            await exchange.done
        except BaseException:
            # After a failure the connection is closed. Otherwise the rest of this response would be
            # read as the response to the next request.
            connection.exchange = None
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, self._host, self._port, ssl=self._ssl
        )
        return connection
