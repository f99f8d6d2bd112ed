"""The iterators that a streaming call of the engine returns, for `for` and for `async for`.

If a program leaves an iterator by `break`, an exception, `close` or cancellation, the request is
aborted.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import Any

from headrace.engine.core import EngineCore
from headrace.engine.generate_calls import StreamedRequest

Chunk = dict[str, Any]


class _Reader:
    def __init__(self, core: EngineCore, owner: object, request: StreamedRequest | None) -> None:
        self._core = core
        # This reference keeps the engine alive while the stream is read.
        self._owner = owner
        self._request = request

    def _take(self) -> StreamedRequest | None:
        request, self._request = self._request, None
        return request

    def __del__(self) -> None:
        request = self._take()
        if request is not None:
            self._core.leave(request.abandon())


class ChunkIterator(_Reader, Generator[Chunk, None, None]):
    """An iterator over the chunks of an answer, for a `for` loop on any thread."""

    def __next__(self) -> Chunk:
        if self._request is None:
            raise StopIteration
        try:
            chunk = self._core.call(self._request.read())
        except BaseException:
            self.close()
            raise
        if chunk is None:
            self._take()
            raise StopIteration
        return chunk

    def send(self, value: None) -> Chunk:  # noqa: ARG002  # the protocol's parameter
        """Return the next chunk; the same as `next(iterator)`."""
        return next(self)

    def throw(
        self,
        kind: Any,
        value: Any = None,
        traceback: TracebackType | None = None,
    ) -> Chunk:
        """Abort the request and end the stream, then raise the given exception."""
        self.close()
        return super().throw(kind, value, traceback)

    def close(self) -> None:
        """Stop reading; a running request is aborted."""
        request = self._take()
        if request is not None:
            self._core.leave(request.abandon())


class AsyncChunkIterator(_Reader, AsyncGenerator[Chunk, None]):
    """An iterator over the chunks of an answer, for `async for` in any event loop."""

    async def __anext__(self) -> Chunk:
        if self._request is None:
            raise StopAsyncIteration
        try:
            chunk = await self._core.call_async(self._request.read())
        except BaseException:
            await self.aclose()
            raise
        if chunk is None:
            self._take()
            raise StopAsyncIteration
        return chunk

    async def asend(self, value: None) -> Chunk:  # noqa: ARG002  # the protocol's parameter
        """Return the next chunk; the same as `anext(iterator)`."""
        return await anext(self)

    async def athrow(
        self,
        kind: Any,
        value: Any = None,
        traceback: TracebackType | None = None,
    ) -> Chunk:
        """Abort the request and end the stream, then raise the given exception."""
        await self.aclose()
        return await super().athrow(kind, value, traceback)

    async def aclose(self) -> None:
        """Stop reading; a running request is aborted."""
        request = self._take()
        if request is not None:
            self._core.leave(request.abandon())
