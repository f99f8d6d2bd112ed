"""What an endpoint is asked and what it answers; who carries both is another's business."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from runtime.service.generation import DONE, Chunk


@dataclass(frozen=True)
class Call:
    """A request.

    Attributes:
        body: not decoded yet: JSON, or a form where the endpoint takes one.
        path: the parts of the path that have a name.
        query: what follows the path; of a name that comes twice, the last.
        content_type: of the body.
    """

    body: bytes | bytearray = b""
    path: Mapping[str, Any] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"


@dataclass(frozen=True)
class Whole:
    """An answer in one piece: JSON, in which lists may be `Pieces`."""

    content: Any


@dataclass(frozen=True)
class FileContent:
    """The bytes of a file, open: it may be deleted while they are sent."""

    file: BinaryIO
    num_bytes: int


@dataclass(frozen=True)
class Streamed:
    """An answer in events.

    Attributes:
        events: a failure among them is told by who sends them, and so is the end.
        on_end: called once, however the answer ends.
        end: the bytes that end the stream.
        media_type: of the stream.
    """

    events: AsyncGenerator[Chunk, None]
    on_end: Callable[[], None]
    end: bytes = DONE
    media_type: str = "text/event-stream"


Reply = Whole | FileContent | Streamed
