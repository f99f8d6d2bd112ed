"""Server-sent events as ready-made bytes; who sends them is another's business."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

from runtime.client.json_pieces import encode

DONE = b"data: [DONE]\n\n"

# Bytes that are ready, or ones that take so long to make that they are made while they are sent.
Chunk = bytes | Iterator[bytes]


def event(content: Mapping[str, object]) -> Chunk:
    """One event with a JSON payload, in which lists may be `Pieces`."""
    data = encode(content)
    if isinstance(data, bytes):
        return b"data: " + data + b"\n\n"
    return itertools.chain((b"data: ",), data, (b"\n\n",))


def named_event(name: str, content: Mapping[str, object]) -> Chunk:
    """`event`, with its name on a line of its own."""
    head = b"event: " + name.encode() + b"\n"
    payload = event(content)
    return head + payload if isinstance(payload, bytes) else itertools.chain((head,), payload)


def joined(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The same, those that are ready as one."""
    ready: list[bytes] = []
    for chunk in chunks:
        if isinstance(chunk, bytes):
            ready.append(chunk)
            continue
        if ready:
            yield b"".join(ready)
            ready = []
        yield chunk
    if ready:
        yield b"".join(ready)
