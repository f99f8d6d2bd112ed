"""The state to which a program appends: `ProgramState`, or `AsyncProgramState` for `async def`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, overload

from headrace.lang import ir
from headrace.lang.events import Event, Usage
from headrace.lang.executor import StreamExecutor
from headrace.lang.explain import explain_html, explain_text
from headrace.lang.forking import AsyncProgramStateGroup, ProgramStateGroup, fork_and_warm
from headrace.lang.text_readers import AsyncTextIterator, TextIterator, TextReader, VariableReader

T = TypeVar("T")
Key = str | ir.SglGen[Any]


class AppliedExpr(ir.SglExprList):
    """A turn that is already appended, so that `s += s.user("x")` does not append it again."""

    __slots__ = ("executor",)

    def __init__(self, expression: ir.SglExpr, executor: StreamExecutor) -> None:
        """Store the expression, and the executor to which it was appended."""
        super().__init__([expression])
        self.executor = executor


def _name_of(key: Key) -> str:
    if isinstance(key, ir.SglGen):
        if key.name is None:
            raise TypeError("This generation has no name.")
        return key.name
    return key


def turn(role: str, content: ir.SglExpr | str | None) -> ir.SglExprList:
    """Return an expression that appends a whole turn of `role`."""
    inner = [] if content is None else [ir.as_expression(content)]
    return ir.SglExprList([ir.SglRoleBegin(role), *inner, ir.SglRoleEnd(role)])


class _State:
    """The methods of a program's state that do not wait."""

    def __init__(self, executor: StreamExecutor) -> None:
        """Wrap `executor`."""
        self.stream_executor = executor

    # ---- appending ----

    def __iadd__(self, other: ir.SglExpr | str) -> Self:
        """Append a text or an expression; return before it is executed.

        Raises:
            ValueError: `other` is None.
            TypeError: `other` is neither text nor an expression.
            ProgramError: the program has already failed.
        """
        if other is None:
            raise ValueError("None cannot be appended to a program.")
        if isinstance(other, AppliedExpr) and other.executor is self.stream_executor:
            return self
        self.stream_executor.submit(other)
        return self

    @overload
    def role(self, name: str, expr: ir.SglExpr | str) -> AppliedExpr: ...
    @overload
    def role(self, name: str, expr: None = None) -> contextlib.AbstractContextManager[None]: ...
    def role(
        self, name: str, expr: ir.SglExpr | str | None = None
    ) -> AppliedExpr | contextlib.AbstractContextManager[None]:
        """Append a whole turn of the role `name`.

        Without `expr`, return a context manager; text appended in its block becomes the turn.
        """
        if expr is None:
            return self._scope(ir.SglRoleBegin(name), ir.SglRoleEnd(name))
        expression = turn(name, expr)
        self.stream_executor.submit(expression)
        return AppliedExpr(expression, self.stream_executor)

    @overload
    def system(self, expr: ir.SglExpr | str) -> AppliedExpr: ...
    @overload
    def system(self, expr: None = None) -> contextlib.AbstractContextManager[None]: ...
    def system(self, expr: Any = None) -> Any:
        """Append a system turn, or return a context manager for one; see `role`."""
        return self.role("system", expr)

    @overload
    def user(self, expr: ir.SglExpr | str) -> AppliedExpr: ...
    @overload
    def user(self, expr: None = None) -> contextlib.AbstractContextManager[None]: ...
    def user(self, expr: Any = None) -> Any:
        """Append a user turn, or return a context manager for one; see `role`."""
        return self.role("user", expr)

    @overload
    def assistant(self, expr: ir.SglExpr | str) -> AppliedExpr: ...
    @overload
    def assistant(self, expr: None = None) -> contextlib.AbstractContextManager[None]: ...
    def assistant(self, expr: Any = None) -> Any:
        """Append an assistant turn, or return a context manager for one; see `role`."""
        return self.role("assistant", expr)

    def var_scope(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a context manager; the text appended in its block becomes the variable `name`."""
        return self._scope(ir.SglVarScopeBegin(name), ir.SglVarScopeEnd(name))

    @contextlib.contextmanager
    def _scope(self, begin: ir.SglExpr, end: ir.SglExpr) -> Generator[None, None, None]:
        self.stream_executor.submit(begin)
        try:
            yield
        finally:
            self.stream_executor.close_quietly(end)

    # ---- variables ----

    def set_var(self, name: str, value: Any) -> None:
        """Set a variable to any object, without changing the text."""
        executor = self.stream_executor
        with executor.family.lock:
            executor.vars.values[name] = value
            executor.vars.abandoned.discard(name)
            executor.family.notify()

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, name: object) -> bool:
        """Whether the variable is set now; it does not wait for a pending generation."""
        return name in self.stream_executor.vars.values

    # ---- the program ----

    def cancel(self) -> None:
        """Abort the running request and drop everything queued, also in the children."""
        self.stream_executor.cancel()

    def usage(self) -> Usage:
        """Return the tokens and times of all requests so far, including those of the children."""
        return self.stream_executor.family.usage

    def explain(self, html: str | Path | None = None) -> str:
        """Return a text with one line for each event so far: its tokens, cached tokens and times.

        Args:
            html: path of a file to which the same is also written as an HTML page. The page shows
                probabilities of tokens, if the program used `return_logprob`.
        """
        executor = self.stream_executor
        with executor.family.lock:
            text, events = executor.text_, executor.events
        usage = self.usage()
        if html is not None:
            title = executor.family.name or "program"
            page = explain_html(text, events, usage, title=title)
            Path(html).write_text(page, encoding="utf-8")
        return explain_text(text, events, usage)

    @property
    def events(self) -> list[Event]:
        """The steps executed so far, in order."""
        return self.stream_executor.events

    def text_async_iter(
        self, var_name: Key | None = None, return_meta_data: bool = False
    ) -> AsyncTextIterator:
        """Return an async iterator over pieces of the text, or of a variable's text.

        Args:
            var_name: the variable; None for the whole text.
            return_meta_data: yield pairs of a piece and its meta information, which is None for
                pieces of the whole text.
        """
        executor = self.stream_executor
        if var_name is None:
            return AsyncTextIterator(TextReader(executor, with_meta=return_meta_data))
        name = _name_of(var_name)
        return AsyncTextIterator(VariableReader(executor, name, with_meta=return_meta_data))

    # ---- reads, once everything is there ----

    def _text(self) -> str:
        return self.stream_executor.text_

    def _messages(self) -> list[dict[str, Any]]:
        return self.stream_executor.messages_

    def _error(self) -> BaseException | None:
        executor = self.stream_executor
        return executor.error_ or executor.family.body_error

    def _record(self) -> dict[str, Any]:
        executor = self.stream_executor
        error = self._error()
        with executor.family.lock:
            return {
                "function": executor.family.name,
                "text": executor.text_,
                "messages": list(executor.messages_),
                "variables": dict(executor.vars.values),
                "meta_info": dict(executor.vars.metas),
                "usage": dataclasses.asdict(executor.family.usage),
                "error": None if error is None else str(error),
            }

    def _meta(self, name: str) -> Any:
        with self.stream_executor.family.lock:
            return self.stream_executor.vars.metas.get(name)

    def _value(self, key: Key, kind: type[Any] | None) -> Any:
        name = _name_of(key)
        executor = self.stream_executor
        text = executor.take(name)
        if kind is not None:
            parse: Any = _parser(kind)
        else:
            parse = executor.vars.parsers.get(name)
        if parse is None:
            return text
        texts = text if isinstance(text, list) else [text]
        try:
            values = [parse(one) for one in texts]
        except ValueError as error:
            meta = executor.vars.metas.get(name)
            reason = meta.get("finish_reason") if isinstance(meta, dict) else None
            raise ValueError(
                f"The variable {name!r} is not of its type: {error}. Its text is {text!r}, which "
                f"ended by {reason}."
            ) from error
        return values if isinstance(text, list) else values[0]


def _parser(kind: type[Any]) -> Any:
    from headrace.lang.dtypes import dtype_name, parser_of_dtype, schema_and_parser

    if kind in (int, float, bool, str):
        return parser_of_dtype(dtype_name(kind))
    return schema_and_parser(kind)[1]


class ProgramState(_State):
    """The state of a program that is a plain function; its reads block until the value is there."""

    # ---- variables ----

    @overload
    def __getitem__(self, name: ir.SglGen[T]) -> T: ...
    @overload
    def __getitem__(self, name: str) -> Any: ...
    def __getitem__(self, name: Key) -> Any:
        """Wait for a variable and return its value.

        A name gives the variable's text; the generation (the result of `gen`) gives its typed
        value.

        Raises:
            ProgramError: the variable was not set; this error is also a `KeyError`.
        """
        if isinstance(name, ir.SglGen):
            return self.value(name)
        return self.get_var(name)

    def get_var(self, name: str) -> Any:
        """Wait for a variable and return its value; the same as `state[name]`."""
        executor = self.stream_executor
        executor.family.wait(executor.when_settled(name))
        return executor.take(name)

    @overload
    def value(self, name: ir.SglGen[T]) -> T: ...
    @overload
    def value(self, name: str, kind: type[T]) -> T: ...
    @overload
    def value(self, name: str) -> Any: ...
    def value(self, name: Key, kind: type[Any] | None = None) -> Any:
        """Wait for a variable and return it as a value of its `gen`'s type, or of the type `kind`.

        With `n` above 1 the result is a list.

        Raises:
            ProgramError: the variable was not set.
            ValueError: its text does not have this type, for example because `max_tokens` cut it.
        """
        executor = self.stream_executor
        executor.family.wait(executor.when_settled(_name_of(name)))
        return self._value(name, kind)

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """Return the back end's meta information about a variable; None for an unknown variable.

        Raises:
            TimeoutError: the variable was not set within `timeout` seconds.
        """
        executor = self.stream_executor
        executor.family.wait(executor.when_settled(name), timeout)
        return self._meta(name)

    # ---- the whole ----

    def sync(self) -> None:
        """Wait until all appended expressions have been executed."""
        executor = self.stream_executor
        executor.family.wait(executor.when_idle())

    def text(self) -> str:
        """Wait and return the whole text with role markup; after an error, the text so far."""
        self.sync()
        return self._text()

    def messages(self) -> list[dict[str, Any]]:
        """Wait for the program and return its turns as messages in OpenAI's format."""
        self.sync()
        return self._messages()

    def error(self) -> BaseException | None:
        """Wait for the program and return its first error, or None."""
        self.sync()
        return self._error()

    def to_dict(self) -> dict[str, Any]:
        """Wait for the program and return its results as a dictionary.

        Returns:
            `function`, `text`, `messages`, `variables`, `meta_info`, `usage`, and `error` (a text
            or None). All of it can be written as JSON, unless variables were set to other objects.
        """
        self.sync()
        return self._record()

    @property
    def ret_value(self) -> Any:
        """The value that the program's function returned; waits until the function has returned.

        Raises:
            BaseException: the exception that the function raised.
        """
        family = self.stream_executor.family
        family.wait(lambda: family.body_done)
        if family.body_error is not None:
            raise family.body_error
        return family.ret_value

    def text_iter(self, var_name: Key | None = None) -> TextIterator:
        """Return an iterator over the text or a variable, in pieces if `stream` was set."""
        executor = self.stream_executor
        if var_name is None:
            return TextIterator(TextReader(executor))
        return TextIterator(VariableReader(executor, _name_of(var_name)))

    # ---- children ----

    def fork(
        self, size: int = 1, position_ids_offset: list[int] | None = None
    ) -> ProgramStateGroup:
        """Wait until all appended expressions are executed, then create independent children.

        Raises:
            ProgramError: the program has failed.
        """
        self.sync()
        children = fork_and_warm(self.stream_executor, size, position_ids_offset)
        return ProgramStateGroup([ProgramState(child) for child in children], self)

    @contextlib.contextmanager
    def copy(self, position_ids_offset: list[int] | None = None) -> Iterator[ProgramState]:
        """Return a context manager with one child of this program.

        At the end of its block, each variable that only the child has becomes a list with the
        child's value.
        """
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        finally:
            group.join()

    @property
    def aio(self) -> AsyncProgramState:
        """Return a state of the same program whose reads are awaited."""
        return AsyncProgramState(self.stream_executor)

    def __repr__(self) -> str:
        return f"ProgramState({self.text()})"


class _Reading(Generic[T]):
    """The awaitable that `state["x"]` returns."""

    __slots__ = ("_key", "_state")

    def __init__(self, state: AsyncProgramState, key: Key) -> None:
        self._state = state
        self._key = key

    def __await__(self) -> Generator[Any, None, T]:
        return self._state._read(self._key).__await__()


class AsyncProgramState(_State):
    """The state of a program that is an `async def` function; its reads are awaited."""

    @overload
    def __getitem__(self, name: ir.SglGen[T]) -> _Reading[T]: ...
    @overload
    def __getitem__(self, name: str) -> _Reading[Any]: ...
    def __getitem__(self, name: Key) -> Any:
        """Return an awaitable of a variable's value.

        A name gives the variable's text; the generation (the result of `gen`) gives its typed
        value.
        """
        return _Reading(self, name)

    async def _read(self, key: Key) -> Any:
        if isinstance(key, ir.SglGen):
            return await self.value(key)
        return await self.get_var(key)

    async def get_var(self, name: str) -> Any:
        """Wait for a variable and return its value; the same as `await state[name]`."""
        executor = self.stream_executor
        await executor.family.wait_async(executor.when_settled(name))
        return executor.take(name)

    @overload
    async def value(self, name: ir.SglGen[T]) -> T: ...
    @overload
    async def value(self, name: str, kind: type[T]) -> T: ...
    @overload
    async def value(self, name: str) -> Any: ...
    async def value(self, name: Key, kind: type[Any] | None = None) -> Any:
        """Do the same as `ProgramState.value`, but as a coroutine."""
        executor = self.stream_executor
        await executor.family.wait_async(executor.when_settled(_name_of(name)))
        return self._value(name, kind)

    async def get_meta_info(self, name: str) -> Any:
        """Wait for a variable; return the back end's meta information, None for an unknown name."""
        executor = self.stream_executor
        await executor.family.wait_async(executor.when_settled(name))
        return self._meta(name)

    async def sync(self) -> None:
        """Wait until all appended expressions have been executed."""
        executor = self.stream_executor
        await executor.family.wait_async(executor.when_idle())

    async def text(self) -> str:
        """Wait and return the whole text with role markup; after an error, the text so far."""
        await self.sync()
        return self._text()

    async def messages(self) -> list[dict[str, Any]]:
        """Wait for the program and return its turns as messages in OpenAI's format."""
        await self.sync()
        return self._messages()

    async def error(self) -> BaseException | None:
        """Wait for the program and return its first error, or None."""
        await self.sync()
        return self._error()

    async def to_dict(self) -> dict[str, Any]:
        """Wait for the program and return its results with the keys of `ProgramState.to_dict`."""
        await self.sync()
        return self._record()

    async def fork(
        self, size: int = 1, position_ids_offset: list[int] | None = None
    ) -> AsyncProgramStateGroup:
        """Wait until all appended expressions are executed, then create independent children."""
        await self.sync()
        children = fork_and_warm(self.stream_executor, size, position_ids_offset)
        return AsyncProgramStateGroup([AsyncProgramState(child) for child in children], self)

    @contextlib.asynccontextmanager
    async def copy(
        self, position_ids_offset: list[int] | None = None
    ) -> AsyncIterator[AsyncProgramState]:
        """Return an async context manager of one child; otherwise like `ProgramState.copy`."""
        group = await self.fork(1, position_ids_offset)
        try:
            yield group[0]
        finally:
            await group.join()

    def __repr__(self) -> str:
        return f"AsyncProgramState({self.stream_executor.text_})"
