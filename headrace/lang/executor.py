"""Executes the expressions that a program appends, in order, on the frontend's event loop."""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from headrace.lang import ir
from headrace.lang.core_loop import core
from headrace.lang.events import Event, Mark, as_event
from headrace.lang.family import Family
from headrace.lang.generating import Fill, fill_and_close, generate, select
from headrace.lang.media_input import Media, load_media, load_video
from headrace.lang.program_errors import ProgramCancelled, ProgramError, ProgramTimeout, Source
from headrace.lang.sampling import SglSamplingParams
from headrace.lang.steps import Step, steps_of
from headrace.lang.variables import Variables

if TYPE_CHECKING:
    from headrace.lang.backend.base import BaseBackend, Message

_sids = itertools.count(1)


class StreamExecutor:
    """Executes one program, or one child that `fork` made, and holds its state.

    Attributes:
        backend: the back end that runs the generations.
        text_: all text so far.
        messages_: the turns that have ended.
        images_: all images so far; `cur_images` holds the images of the open turn.
        error_: the first error of the program.
        log: the executed steps; `events` returns all of them as `Event`.
        first_request: awaited before the next request; it waits until a common prefix is cached.
        uncached_from: offset in `text_` of the text that no request has sent yet.
        fills: the parts of the open turn, if one request will fill the whole turn.
    """

    # Slots save memory, because ten thousand instances may exist at the same time.
    __slots__ = (
        "__weakref__",
        "_children",
        "_num_readers",
        "_queue",
        "_scopes",
        "_task",
        "backend",
        "chat_template",
        "cur_images",
        "cur_role",
        "cur_role_begin_pos",
        "default_sampling_para",
        "error_",
        "family",
        "fills",
        "first_request",
        "fork_start_text_pos",
        "images_",
        "is_running",
        "log",
        "messages_",
        "num_api_spec_tokens",
        "sid",
        "stream",
        "text_",
        "uncached_from",
        "vars",
    )

    def __init__(
        self,
        backend: BaseBackend,
        default_sampling_para: SglSamplingParams,
        family: Family,
        *,
        stream: bool = False,
        num_api_spec_tokens: int | None = None,
    ) -> None:
        """Create an executor whose text is empty."""
        self.sid = f"{next(_sids):x}"
        self.backend = backend
        self.default_sampling_para = default_sampling_para
        self.family = family
        self.stream = stream
        self.num_api_spec_tokens = num_api_spec_tokens
        self.chat_template = backend.get_chat_template()
        self.text_ = ""
        self.messages_: list[Message] = []
        self.cur_role: str | None = None
        self.cur_role_begin_pos = 0
        self.images_: list[Media] = []
        self.cur_images: list[Media] = []
        self.vars = Variables()
        self.error_: BaseException | None = None
        self.log: list[Event | Mark] = []
        self.first_request: Awaitable[None] | None = None
        self.fork_start_text_pos = 0
        self.is_running = False
        self._queue: deque[Step] = deque()
        self._task: asyncio.Task[None] | None = None
        self._scopes: dict[str, int] | None = None
        self._children: weakref.WeakSet[StreamExecutor] | None = None
        self._num_readers = 0
        self.uncached_from = 0
        self.fills: list[Fill] | None = None

    # ---- what notebooks look at ----

    @property
    def variables(self) -> dict[str, Any]:
        """The values of all variables that are set, by name."""
        return self.vars.values

    @property
    def meta_info(self) -> dict[str, Any]:
        """The back end's meta information about each variable's request, by name."""
        return self.vars.metas

    @property
    def events(self) -> list[Event]:
        """The steps executed so far, in order."""
        with self.family.lock:
            return [as_event(one) for one in self.log]

    # ---- appending: from any thread ----

    def submit(self, value: ir.SglExpr | str) -> None:
        """Append a text or an expression to the queue of this program.

        Raises:
            TypeError: `value` is neither text nor an expression.
            ProgramError: the program has already failed.
        """
        steps = steps_of(ir.as_expression(value))
        with self.family.lock:
            if self.error_ is not None:
                raise self.error_
            for part, _ in steps:
                for name in ir.names_set(part):
                    self.vars.expect(name)
            self._queue.extend(steps)
            if self.is_running or not self._queue:
                return
            self.is_running = True
        core().start_soon(self._start)

    def close_quietly(self, value: ir.SglExpr) -> None:
        """Queue an expression that ends a turn or scope; do nothing if the program has failed."""
        if self.error_ is None:
            self.submit(value)

    def cancel(self) -> None:
        """Abort the running request and drop the queue, in this program and its children."""
        self._end("The program was cancelled", ProgramCancelled)

    def end_after(self, timeout_s: float) -> None:
        """Cancel the program in `timeout_s` seconds, unless it is done by then."""

        def begin() -> None:
            message = f"The program was not done within {timeout_s:g} s"
            loop = asyncio.get_running_loop()
            timer = loop.call_later(timeout_s, self._end, message, ProgramTimeout)
            self.family.call_when(
                lambda: self.is_idle(own_body=False), lambda: core().call_soon(timer.cancel)
            )

        core().call_soon(begin)

    def _end(self, message: str, kind: type[ProgramCancelled]) -> None:
        with self.family.lock:
            if self.is_running or not self.family.body_done:
                self.fail(self._error(message, kind=kind))
            children = list(self._children or ())
        core().start_soon(self._stop)
        for child in children:
            child.cancel()

    def fail(self, error: BaseException) -> None:
        """Record an error, unless there is one already, and drop the queue; needs the lock."""
        if self.error_ is None:
            self.error_ = error
        self._queue.clear()
        self.vars.abandon()
        self.family.notify()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # ---- executing: on the core's loop ----

    def _start(self) -> None:
        self._task = task = asyncio.get_running_loop().create_task(self._run())
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        # The task was cancelled before it ran, so `_run` could not clear it.
        if self._task is task:
            with self.family.lock:
                self.fail(self._cancelled())
                self._rest()

    async def _run(self) -> None:
        try:
            while True:
                with self.family.lock:
                    if not self._queue:
                        self._rest()
                        return
                    part, reasoning = self._queue.popleft()
                try:
                    work = self._execute(part, reasoning)
                    if work is not None:
                        await work
                except Exception as error:
                    told = error if isinstance(error, ProgramError) else self._told(error, part)
                    with self.family.lock:
                        self.fail(told)
        except BaseException as error:
            # The task was cancelled, or the error is one such as KeyboardInterrupt, which must
            # reach the loop.
            with self.family.lock:
                self.fail(error if isinstance(error, Exception) else self._cancelled())
                self._rest()
            if not isinstance(error, (Exception, asyncio.CancelledError)):
                raise

    def _rest(self) -> None:
        self.is_running = False
        self._task = None
        if self.family.body_done:
            self.backend.end_program(self)
        self.family.notify()

    def _execute(self, part: ir.SglExpr, reasoning: str | None) -> Awaitable[None] | None:
        """Execute `part`; return an awaitable if the part needs a request, else `None`."""
        match part:
            case ir.SglConstantText(value=text):
                self._append_text("text", None, text)
            case ir.SglRoleBegin(role=role):
                self._begin_role(role)
            case ir.SglRoleEnd(role=role):
                return self._end_role(role)
            case ir.SglGen():
                return generate(self, part, reasoning)
            case ir.SglSelect():
                return select(self, part, reasoning)
            case ir.SglVarScopeBegin(name=name):
                self._scopes = {**(self._scopes or {}), name: len(self.text_)}
            case ir.SglVarScopeEnd(name=name):
                self._end_scope(name)
            case ir.SglImage() | ir.SglVideo():
                return self._add_media(part)
            case _:
                raise TypeError(f"{part!r} cannot be executed.")
        return None

    # ---- text and turns ----

    def _append_text(
        self, kind: str, name: str | None, text: str, began_s: float | None = None
    ) -> None:
        now = time.perf_counter()
        with self.family.lock:
            start = len(self.text_)
            self.text_ += text
            self.log.append((kind, name, start, len(self.text_), began_s or now, now))
            if self.fills is not None:
                self.fills.append(Fill(text=text))
            if self.stream:
                self.family.notify()

    def _begin_role(self, role: str) -> None:
        if self.cur_role is not None:
            raise ValueError(f"The turn of {role!r} begins inside the turn of {self.cur_role!r}.")
        template = self.chat_template
        if role != "system" and not self.messages_ and template.default_system_prompt is not None:
            default = template.default_system_prompt
            prefix, suffix = template.get_prefix_and_suffix("system", self.messages_)
            self._append_text("text", None, f"{prefix}{default}{suffix}")
            self.messages_.append({"role": "system", "content": default})
        prefix, _ = template.get_prefix_and_suffix(role, self.messages_)
        self._append_text("role_begin", role, prefix)
        self.cur_role = role
        self.cur_role_begin_pos = len(self.text_)
        if self.num_api_spec_tokens is not None and self.backend.support_api_speculation:
            self.fills = [] if role == "assistant" else None

    def _end_role(self, role: str) -> Awaitable[None] | None:
        if self.cur_role != role:
            open_role = f"the turn of {self.cur_role!r}" if self.cur_role else "no turn"
            raise ValueError(f"The turn of {role!r} ends, but {open_role} is open.")
        if self.fills is not None:
            return fill_and_close(self, role, self.fills)
        self.close_role(role)
        return None

    def close_role(self, role: str) -> None:
        """Add the open turn to the messages, and append the text that ends it."""
        content: Any = self.text_[self.cur_role_begin_pos :].lstrip()
        _, suffix = self.chat_template.get_prefix_and_suffix(role, self.messages_)
        if self.cur_images:
            content = [
                {"type": "text", "text": content},
                *(
                    {"type": "image_url", "image_url": {"url": media.data_url}}
                    for media in self.cur_images
                ),
            ]
        with self.family.lock:
            self._append_text("role_end", role, suffix)
            # The list is replaced and not changed, because a reader may be using the old list.
            self.messages_ = [*self.messages_, {"role": role, "content": content}]
            self.cur_role = None
            self.cur_images = []

    def _end_scope(self, name: str) -> None:
        scopes = self._scopes or {}
        if name not in scopes:
            raise ValueError(f"The scope of {name!r} ends, but it never began.")
        with self.family.lock:
            self.vars.set(name, self.text_[scopes.pop(name) :], None)
            self.family.notify()

    async def _add_media(self, part: ir.SglImage | ir.SglVideo) -> None:
        began = time.perf_counter()
        if isinstance(part, ir.SglVideo):
            path, num_frames = part.path, part.num_frames
            media = await core().threads.call(lambda: load_video(path, num_frames))
        elif isinstance(part.path, Media):
            media = [part.path]
        else:
            path = part.path
            media = [await core().threads.call(lambda: load_media(path))]
        with self.family.lock:
            self.images_ = [*self.images_, *media]
            self.cur_images = [*self.cur_images, *media]
            # A video is sent as its frames, one image each.
            tokens = self.chat_template.image_token * len(media)
            self._append_text("image", None, tokens, began)

    # ---- children ----

    def fork(self, size: int, position_ids_offset: list[int] | None = None) -> list[StreamExecutor]:
        """Create children that begin as copies of this program, whose queue must be empty.

        Raises:
            ProgramError: the program has failed.
        """
        with self.family.lock:
            if self.error_ is not None:
                raise self.error_
            children = [self._copy() for _ in range(size)]
            if self._children is None:
                self._children = weakref.WeakSet()
            self._children.update(children)
            now = time.perf_counter()
            at = len(self.text_)
            self.log.append(("fork", str(size), at, at, now, now))
        for child in children:
            self.backend.fork_program(self, child, position_ids_offset)
        return children

    def _copy(self) -> StreamExecutor:
        child = StreamExecutor(
            self.backend,
            self.default_sampling_para,
            self.family,
            stream=self.stream,
            num_api_spec_tokens=self.num_api_spec_tokens,
        )
        child.chat_template = self.chat_template
        child.text_ = self.text_
        child.messages_ = list(self.messages_)
        child.cur_role = self.cur_role
        child.cur_role_begin_pos = self.cur_role_begin_pos
        child.images_ = list(self.images_)
        child.cur_images = list(self.cur_images)
        child.vars = self.vars.copy()
        child.fork_start_text_pos = len(self.text_)
        child._scopes = dict(self._scopes) if self._scopes else None
        child.uncached_from = self.uncached_from
        return child

    @property
    def uncached_text(self) -> str:
        """Return the end of the program's text that no request has sent yet."""
        return self.text_[self.uncached_from :]

    # ---- readers of its streams ----

    def add_reader(self) -> None:
        """Count one more reader of the program's stream.

        The program is cancelled when its last reader leaves early (`drop_reader`).
        """
        with self.family.lock:
            self._num_readers += 1

    def drop_reader(self, *, has_left: bool) -> None:
        """Remove a reader. If the last reader left early, the program is cancelled."""
        with self.family.lock:
            self._num_readers -= 1
            is_last = self._num_readers == 0
        if has_left and is_last:
            self.cancel()

    # ---- errors ----

    def _told(self, error: Exception, part: ir.SglExpr) -> ProgramError:
        variable = next(iter(ir.names_set(part)), None)
        source: Source | None = getattr(part, "source", None)
        words = f"{type(error).__name__}: {error}"
        subject = f"The variable {variable!r} could not be set" if variable else f"{part!r} failed"
        told = self._error(f"{subject}: {words}", variable=variable, source=source)
        told.__cause__ = error
        return told

    def _cancelled(self) -> ProgramError:
        return self._error("The program was cancelled", kind=ProgramCancelled)

    def _error(
        self,
        message: str,
        *,
        variable: str | None = None,
        source: Source | None = None,
        kind: type[ProgramError] = ProgramError,
    ) -> ProgramError:
        return kind(
            message,
            function=self.family.name,
            variable=variable,
            source=source,
            prompt_tail=self.text_,
        )

    # ---- waiting and reading: from any thread ----

    def is_idle(self, *, own_body: bool) -> bool:
        """Whether all appended expressions are executed, and no more can follow; needs the lock.

        If the caller is the program's own body, only it could append more, so an empty queue is
        enough. For other callers, the body must also have ended.
        """
        return not self.is_running and (own_body or self.family.body_done)

    def when_idle(self) -> Callable[[], bool]:
        """Return a condition for `wait` that calls `is_idle` for this caller."""
        own_body = self.family.is_own_body
        return lambda: self.is_idle(own_body=own_body)

    def when_settled(self, name: str) -> Callable[[], bool]:
        """Return a condition for `wait`: the variable's value is final, as this caller sees it."""
        own_body = self.family.is_own_body

        def is_settled() -> bool:
            if self.vars.is_expected(name):
                return False
            if name in self.vars.values or self.error_ is not None:
                return True
            return own_body or self.family.body_done

        return is_settled

    def take(self, name: str) -> Any:
        """Return the value of a variable that is final (see `when_settled`).

        Raises:
            ProgramError: the variable was never set.
        """
        with self.family.lock:
            if name in self.vars.values and name not in self.vars.abandoned:
                return self.vars.values[name]
            error = self.error_ or self.family.body_error
            known = ", ".join(map(repr, self.vars.values)) or "none"
        if error is None:
            raise ProgramError(
                f"There is no variable {name!r}; there are: {known}", function=self.family.name
            )
        if isinstance(error, ProgramError) and (
            error.variable in (None, name) or isinstance(error, ProgramCancelled)
        ):
            raise error
        raise self._error(
            f"The variable {name!r} was not set, because the program failed before: {error}",
            variable=name,
        ) from error
