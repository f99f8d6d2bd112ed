"""Sends a client one answer, although the replicas that give it may die."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import AsyncIterator

import msgspec
from starlette.types import Send

from headrace.ray.http_call import HttpCall, HttpHead, HttpPart, Resumption

# An answer that needs more than this to go on elsewhere ends with its replica.
_MAX_JOURNAL_BYTES = 64 * 2**20
_STREAMED = (b"text/event-stream", b"application/x-ndjson")
_ENDED = "The replica ended. Please send the request again."
_OTHER = "The replica ended, and another one answered otherwise. Please send the request again."


class OtherAnswer(Exception):
    """A replica does not repeat what the client has of the answer."""


class Relay:
    """One request, and what its client has of the answer.

    A streamed answer is sent as it is made. If its replica dies, the next one gets the journal of
    what was sent, and makes the same lines again, which are left out here. Lines are counted, not
    bytes, because a line may tell how long something took. Any other answer to a POST is sent once
    it is whole.
    """

    def __init__(self, call: HttpCall, send: Send, *, may_resume: bool) -> None:
        """Relay the answer to `call`.

        Args:
            call: the request.
            send: sends ASGI messages to the client.
            may_resume: whether another replica may go on with the answer.
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
        """The request, with the journal of what the client has."""
        return self._call

    @property
    def may_try(self) -> bool:
        """Whether a replica can give the answer, or the rest of it."""
        return not self._has_begun or self._call.resumption is not None

    async def run(self, pieces: AsyncIterator[HttpHead | HttpPart]) -> None:
        """Send what a replica gives, without what the client has.

        Raises:
            RayError: the replica ended.
            OtherAnswer: this replica does not repeat the beginning.
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
        # A file may be large; it is not an answer of the model.
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
        """Keep what the piece adds to the journal, which must not be less than what is sent."""
        resumption = self._call.resumption
        if resumption is None or not piece.entries:
            return
        self._num_journal_bytes += sum(map(len, piece.entries))
        if self._num_journal_bytes > _MAX_JOURNAL_BYTES:
            self._call = dataclasses.replace(self._call, resumption=None)
        else:
            resumption.entries.extend(piece.entries)

    async def fail(self, error: Exception) -> None:
        """End the answer with an error."""
        message = _OTHER if isinstance(error, OtherAnswer) else _ENDED
        if not self._has_begun:
            await refuse(self._send, 503, message)
            return
        # A line that was cut off is ended, so that the error is a line of its own.
        cut_off = b"\n" * bool(self._sent.num_bytes)
        error_line = error_body(message) + b"\n"
        data = cut_off + (b"data: " + error_line + b"\n" if self._has_events else error_line)
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


@dataclasses.dataclass
class _Lines:
    """How much of a text there is.

    Attributes:
        num_lines: whole lines.
        num_bytes: bytes after the last of them.
    """

    num_lines: int = 0
    num_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.num_lines or self.num_bytes)

    def add(self, data: bytes) -> None:
        """Append `data` to the text."""
        self.num_lines += data.count(b"\n")
        _, newline, last = data.rpartition(b"\n")
        self.num_bytes = len(last) + (0 if newline else self.num_bytes)

    def remove_from(self, data: bytes) -> bytes:
        """Return `data` without this text; what is still to be removed is left in this object."""
        while self.num_lines:
            _, newline, data = data.partition(b"\n")
            if not newline:
                return b""
            self.num_lines -= 1
        num_removed = min(self.num_bytes, len(data))
        self.num_bytes -= num_removed
        return data[num_removed:]


def error_body(message: str) -> bytes:
    """Return the JSON of an error."""
    return msgspec.json.encode({"error": {"message": message, "type": "server_error"}})


async def refuse(send: Send, status: int, message: str) -> None:
    """Answer with an error."""
    headers = [(b"content-type", b"application/json")]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": error_body(message), "more_body": False})
