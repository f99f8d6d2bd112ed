"""Sends a client one answer, even if the replica that makes it dies and another continues it."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import AsyncIterator

import msgspec
from starlette.types import Send

from headrace.ray.http_call import HttpCall, HttpHead, HttpPart, Resumption

# The largest journal that is kept. An answer with a larger one cannot continue at another replica.
_MAX_JOURNAL_BYTES = 64 * 2**20
_STREAMED = (b"text/event-stream", b"application/x-ndjson")
_ENDED = "The replica ended. Please send the request again."
_OTHER = "The replica ended, and another one answered otherwise. Please send the request again."


class OtherAnswer(Exception):
    """A replica's answer does not begin with the part that the client has already received."""


class Relay:
    """Passes the answer to one request from replicas to its client.

    A streamed answer is sent to the client while it is made. If its replica dies, the next replica
    gets the journal of the part that was sent. The next replica makes the same lines again, and
    this class skips them. Skipped lines are counted and not compared, because a line may contain a
    duration. Any other answer to a POST request is sent when it is complete.
    """

    def __init__(self, call: HttpCall, send: Send, *, may_resume: bool) -> None:
        """Store the request and its client.

        Args:
            call: the request.
            send: function that sends ASGI messages to the client.
            may_resume: whether another replica may continue the answer.
        """
        self._send = send
        self._is_post = call.method == "POST"
        self._call = call
        if may_resume and self._is_post:
            resumption = Resumption(secrets.token_bytes(16), int(time.time()), [])
            self._call = dataclasses.replace(call, resumption=resumption)
        self._num_journal_bytes = 0
        self._head: HttpHead | None = None
        self._is_streamed = False
        self._has_events = True
        self._has_begun = False
        self._sent = _Lines()

    @property
    def call(self) -> HttpCall:
        """The request for the next replica, with the journal of the part that was sent."""
        return self._call

    @property
    def may_try(self) -> bool:
        """Whether a replica can still make the answer, or the rest of it."""
        return not self._has_begun or self._call.resumption is not None

    async def run(self, pieces: AsyncIterator[HttpHead | HttpPart]) -> None:
        """Send the client a replica's answer, without the part that the client has received.

        Raises:
            RayError: the replica ended.
            OtherAnswer: the replica's answer has another beginning.
        """
        left_out = dataclasses.replace(self._sent)
        body: list[bytes] = []
        async for piece in pieces:
            if isinstance(piece, HttpHead):
                await self._begin(piece)
                continue
            self._note(piece)
            data = left_out.remove_from(piece.body)
            if not data:
                continue
            if self._is_streamed:
                self._sent.add(data)
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
            else:
                body.append(data)
        if left_out:
            raise OtherAnswer
        if not self._has_begun:
            await self._start()
        await self._send({"type": "http.response.body", "body": b"".join(body)})

    async def _begin(self, head: HttpHead) -> None:
        if self._has_begun:
            if self._head is None or head.status != self._head.status:
                raise OtherAnswer
            return
        self._head = head
        kind = dict(head.headers).get(b"content-type", b"")
        # Answers to GET requests are streamed too: they may be large files.
        self._is_streamed = kind.startswith(_STREAMED) or not self._is_post
        self._has_events = not kind.startswith(b"application/x-ndjson")
        if self._is_streamed:
            await self._start()

    async def _start(self) -> None:
        assert self._head is not None
        self._has_begun = True
        head = {"status": self._head.status, "headers": self._head.headers}
        await self._send({"type": "http.response.start", **head})

    def _note(self, piece: HttpPart) -> None:
        """Store the journal entries of a piece, before the piece itself is sent."""
        resumption = self._call.resumption
        if resumption is None or not piece.entries:
            return
        self._num_journal_bytes += sum(map(len, piece.entries))
        if self._num_journal_bytes > _MAX_JOURNAL_BYTES:
            self._call = dataclasses.replace(self._call, resumption=None)
        else:
            resumption.entries.extend(piece.entries)

    async def fail(self, error: Exception) -> None:
        """End the answer with an error for the client."""
        message = _OTHER if isinstance(error, OtherAnswer) else _ENDED
        if not self._has_begun:
            await refuse(self._send, 503, message)
            return
        # A line that was cut off is ended first, so that the error is a separate line.
        cut_off = b"\n" * bool(self._sent.num_bytes)
        error_line = error_body(message) + b"\n"
        data = cut_off + (b"data: " + error_line + b"\n" if self._has_events else error_line)
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


@dataclasses.dataclass
class _Lines:
    """The length of a text, as lines and bytes.

    Attributes:
        num_lines: number of complete lines.
        num_bytes: number of bytes after the last complete line.
    """

    num_lines: int = 0
    num_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.num_lines or self.num_bytes)

    def add(self, data: bytes) -> None:
        """Count `data` as appended to the text."""
        self.num_lines += data.count(b"\n")
        _, newline, last = data.rpartition(b"\n")
        self.num_bytes = len(last) + (0 if newline else self.num_bytes)

    def remove_from(self, data: bytes) -> bytes:
        """Return `data` without a beginning of this length.

        If `data` is shorter than that, this object keeps the length that must still be removed.
        """
        while self.num_lines:
            _, newline, data = data.partition(b"\n")
            if not newline:
                return b""
            self.num_lines -= 1
        num_removed = min(self.num_bytes, len(data))
        self.num_bytes -= num_removed
        return data[num_removed:]


def error_body(message: str) -> bytes:
    """Return the body of an error response, as JSON."""
    return msgspec.json.encode({"error": {"message": message, "type": "server_error"}})


async def refuse(send: Send, status: int, message: str) -> None:
    """Send the client an error response with this status and message."""
    headers = [(b"content-type", b"application/json")]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": error_body(message), "more_body": False})
