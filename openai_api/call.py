"""An endpoint's request and answer, independent of the transport."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from runtime.service.generation import DONE, Chunk


@dataclass(frozen=True)
class Call:
    """A request to an endpoint.

    Attributes:
        body: the undecoded body: JSON, or a form if the endpoint takes one.
        path: the named parts of the path.
        query: the query string's parameters; if a name is repeated, its last value.
        content_type: the media type of the body.
    """

    body: bytes | bytearray = b""
    path: Mapping[str, Any] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"


@dataclass(frozen=True)
class Whole:
    """An answer in one piece: JSON, in which lists may be `Pieces`, encoded while sending."""

    content: Any


@dataclass(frozen=True)
class FileContent:
    """An answer that is the content of an open file, which may be deleted while it is sent."""

    file: BinaryIO
    num_bytes: int


@dataclass(frozen=True)
class Streamed:
    """An answer as a stream of events.

    Attributes:
        events: the encoded events. If the iterator raises an exception, the transport sends an
            error event. In any case it sends `end` afterwards.
        on_end: called once, however the answer ends.
        end: the bytes that end the stream.
        media_type: the media type of the stream.
    """

    events: AsyncGenerator[Chunk, None]
    on_end: Callable[[], None]
    end: bytes = DONE
    media_type: str = "text/event-stream"


Reply = Whole | FileContent | Streamed
