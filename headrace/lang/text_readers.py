"""Readers of a program's text or of a variable while it is generated.

Each reader begins at the start of the text. If the last reader is closed before the end, its
program is cancelled, so that the server does not generate text that stays unread.
"""

from __future__ import annotations

from typing import Any

from headrace.lang.core_loop import core
from headrace.lang.executor import StreamExecutor
from headrace.lang.variables import VariableStream


class _Reader:
    """The base of readers, which return the text that is new since the last read."""

    def __init__(self, executor: StreamExecutor) -> None:
        self._executor = executor
        self._offset = 0
        self._own_body = executor.family.is_own_body
        self._is_open = False
        self._has_ended = False

    def open(self) -> None:
        if not self._is_open and not self._has_ended:
            self._is_open = True
            self._executor.add_reader()

    def leave(self) -> None:
        """Stop reading; the last reader cancels the program, unless its text is complete."""
        if self._is_open:
            self._is_open = False
            has_left = not self._has_ended and self._executor.stream
            self._has_ended = True
            self._executor.drop_reader(has_left=has_left)

    def leave_later(self) -> None:
        """Schedule `leave`; for the garbage collector, which may run while any lock is held."""
        if self._is_open:
            core().start_soon(self.leave)

    def is_ready(self) -> bool:
        raise NotImplementedError

    def take(self) -> Any:
        """Return the next piece.

        Raises:
            StopIteration: the text has ended.
            ProgramError: the program failed; it is raised after all text so far was returned.
        """
        raise NotImplementedError

    def _end(self) -> StopIteration:
        self._has_ended = True
        self.leave()
        return StopIteration()

    def _fail(self, error: BaseException) -> BaseException:
        self._has_ended = True
        self.leave()
        return error


class TextReader(_Reader):
    """Reads the whole text of a program."""

    def __init__(self, executor: StreamExecutor, *, with_meta: bool = False) -> None:
        """Begin at the start of the text; with `with_meta` pieces are pairs of text and None."""
        super().__init__(executor)
        self._with_meta = with_meta

    def is_ready(self) -> bool:
        executor = self._executor
        if executor.is_idle(own_body=self._own_body) or executor.error_ is not None:
            return True
        return executor.stream and len(executor.text_) > self._offset

    def take(self) -> Any:
        executor = self._executor
        piece = executor.text_[self._offset :]
        self._offset += len(piece)
        if piece:
            return (piece, None) if self._with_meta else piece
        error = executor.error_ or executor.family.body_error
        raise self._end() if error is None else self._fail(error)


class VariableReader(_Reader):
    """Reads the text of one variable, in the pieces that the back end yielded."""

    def __init__(self, executor: StreamExecutor, name: str, *, with_meta: bool = False) -> None:
        """Begin at the start of the variable `name`.

        With `with_meta` the pieces are pairs of text and meta information.
        """
        super().__init__(executor)
        self._name = name
        self._with_meta = with_meta
        self._stream: VariableStream | None = None
        self._num_taken = 0
        self._is_settled = executor.when_settled(name)

    def is_ready(self) -> bool:
        if self._stream is None:
            self._stream = self._executor.vars.streams.get(self._name)
        stream = self._stream
        if stream is not None and (len(stream.chunks) > self._num_taken or stream.is_done):
            return True
        return self._is_settled() or self._executor.error_ is not None

    def take(self) -> Any:
        stream = self._stream
        if stream is None:
            return self._take_whole()
        if self._num_taken < len(stream.chunks):
            if self._with_meta:
                end, meta = stream.chunks[self._num_taken]
                self._num_taken += 1
            else:
                end, meta = stream.chunks[-1]
                self._num_taken = len(stream.chunks)
            piece = stream.text[self._offset : end]
            self._offset = end
            return (piece, meta) if self._with_meta else piece
        if stream.is_done:
            raise self._end()
        raise self._fail(self._executor.error_ or RuntimeError("The stream broke off."))

    def _take_whole(self) -> Any:
        if self._num_taken:
            raise self._end()
        self._num_taken = 1
        try:
            value = self._executor.take(self._name)
        except KeyError as error:
            raise self._fail(error) from error.__cause__
        meta = self._executor.vars.metas.get(self._name)
        return (value, meta) if self._with_meta else value


class TextIterator:
    """An iterator over pieces of text for a `for` loop; `close()` or leaving the loop stops it."""

    def __init__(self, reader: _Reader) -> None:
        """Read from `reader`."""
        self._reader = reader

    def __iter__(self) -> TextIterator:
        return self

    def __next__(self) -> str:
        reader = self._reader
        reader.open()
        try:
            reader._executor.family.wait(reader.is_ready)
        except BaseException:
            # The wait was interrupted, for example by Ctrl-C.
            reader.leave()
            raise
        with reader._executor.family.lock:
            return reader.take()

    def close(self) -> None:
        """Stop reading."""
        self._reader.leave()

    def __del__(self) -> None:
        self._reader.leave_later()


class AsyncTextIterator:
    """An iterator over pieces of text for `async for` in any event loop."""

    def __init__(self, reader: _Reader) -> None:
        """Read from `reader`."""
        self._reader = reader

    def __aiter__(self) -> AsyncTextIterator:
        return self

    async def __anext__(self) -> Any:
        reader = self._reader
        reader.open()
        try:
            await reader._executor.family.wait_async(reader.is_ready)
        except BaseException:
            reader.leave()
            raise
        with reader._executor.family.lock:
            try:
                return reader.take()
            except StopIteration:
                pass
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop reading."""
        self._reader.leave()

    def __del__(self) -> None:
        self._reader.leave_later()
