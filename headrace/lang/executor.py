"""Executes what a program appends, in order, on the core's loop."""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from headrace.lang import ir
from headrace.lang.core_loop import core
from headrace.lang.events import Event
from headrace.lang.family import Family
from headrace.lang.media_input import Media, load_media, load_video
from headrace.lang.program_errors import ProgramCancelled, ProgramError, Source
from headrace.lang.sampling import SglSamplingParams
from headrace.lang.variables import Splitter, Variables, VariableStream

if TYPE_CHECKING:
    from headrace.lang.backend.base import BaseBackend, Generated, Message

_sids = itertools.count(1)

Step = tuple[ir.SglExpr, str | None]
"""A part to execute, and the reasoning parser of a generation whose reasoning is taken out."""


class StreamExecutor:
    """The state of one program, or of one child that `fork` made.

    Attributes:
        backend: runs its generations.
        text_: all text so far.
        messages_: the turns that are closed.
        images_: all images so far; `cur_images` are those of the open turn.
        error_: the first thing that went wrong.
        events: what was executed.
        first_request: awaited before the next request; a prefix that is being cached.
    """

    # Ten thousand of them may live at once.
    __slots__ = (
        "__weakref__",
        "_children",
        "_fills",
        "_num_readers",
        "_queue",
        "_scopes",
        "_task",
        "_uncached_from",
        "backend",
        "chat_template",
        "cur_images",
        "cur_role",
        "cur_role_begin_pos",
        "default_sampling_para",
        "error_",
        "events",
        "family",
        "first_request",
        "fork_start_text_pos",
        "images_",
        "is_running",
        "messages_",
        "num_api_spec_tokens",
        "sid",
        "stream",
        "text_",
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
        """Begin with no text."""
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
        self.events: list[Event] = []
        self.first_request: Awaitable[None] | None = None
        self.fork_start_text_pos = 0
        self.is_running = False
        self._queue: deque[Step] = deque()
        self._task: asyncio.Task[None] | None = None
        self._scopes: dict[str, int] | None = None
        self._children: weakref.WeakSet[StreamExecutor] | None = None
        self._num_readers = 0
        self._uncached_from = 0
        self._fills: list[_Fill] | None = None

    # ---- what notebooks look at ----

    @property
    def variables(self) -> dict[str, Any]:
        """The variables that are set."""
        return self.vars.values

    @property
    def meta_info(self) -> dict[str, Any]:
        """The back end's meta information, by variable."""
        return self.vars.metas

    # ---- appending: from any thread ----

    def submit(self, value: ir.SglExpr | str) -> None:
        """Queue `value`.

        Raises:
            TypeError: neither text nor an expression.
            ProgramError: the program has failed before.
        """
        steps = _steps(ir.as_expression(value))
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
        """Queue what closes something; nothing where the program has failed."""
        if self.error_ is None:
            self.submit(value)

    def cancel(self) -> None:
        """End what runs and drop what is queued; the children's too."""
        with self.family.lock:
            if self.is_running or not self.family.body_done:
                self.fail(self._error("The program was cancelled", kind=ProgramCancelled))
            children = list(self._children or ())
        core().start_soon(self._stop)
        for child in children:
            child.cancel()

    def fail(self, error: BaseException) -> None:
        """Keep the first error and drop what is queued; under the lock."""
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
        # Cancelled before its first line.
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
                await self._step(part, reasoning)
        except BaseException as error:
            # A task of the loop that is cancelled, or something that must never be lost.
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

    async def _step(self, part: ir.SglExpr, reasoning: str | None) -> None:
        try:
            work = self._execute(part, reasoning)
            if work is not None:
                await work
        except Exception as error:
            told = error if isinstance(error, ProgramError) else self._told(error, part)
            with self.family.lock:
                self.fail(told)

    def _execute(self, part: ir.SglExpr, reasoning: str | None) -> Awaitable[None] | None:
        """Do what needs no waiting; give what is to be awaited."""
        match part:
            case ir.SglConstantText(value=text):
                self._append_text("text", None, text)
            case ir.SglRoleBegin(role=role):
                self._begin_role(role)
            case ir.SglRoleEnd(role=role):
                return self._end_role(role)
            case ir.SglGen():
                return self._generate(part, reasoning)
            case ir.SglSelect():
                return self._select(part, reasoning)
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

    def _append_text(self, kind: str, name: str | None, text: str) -> None:
        now = time.perf_counter()
        with self.family.lock:
            start = len(self.text_)
            self.text_ += text
            self.events.append(Event(kind, name, start, len(self.text_), now, now, now))
            if self._fills is not None:
                self._fills.append(_Fill(text=text))
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
            self._fills = [] if role == "assistant" else None

    def _end_role(self, role: str) -> Awaitable[None] | None:
        if self.cur_role != role:
            open_role = f"the turn of {self.cur_role!r}" if self.cur_role else "no turn"
            raise ValueError(f"The turn of {role!r} ends, but {open_role} is open.")
        if self._fills is not None:
            return self._fill_and_close(role, self._fills)
        self._close_role(role)
        return None

    def _close_role(self, role: str) -> None:
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
            # A list of its own: whoever reads the messages keeps what was read.
            self.messages_ = [*self.messages_, {"role": role, "content": content}]
            self.cur_role = None
            self.cur_images = []

    def _end_scope(self, name: str) -> None:
        scopes = self._scopes or {}
        if name not in scopes:
            raise ValueError(f"The scope of {name!r} ends and never began.")
        with self.family.lock:
            self.vars.set(name, self.text_[scopes.pop(name) :], None)
            self.family.notify()

    async def _add_media(self, part: ir.SglImage | ir.SglVideo) -> None:
        began = time.perf_counter()
        if isinstance(part, ir.SglVideo):
            path, num_frames = part.path, part.num_frames
            media = await core().threads.call(lambda: load_video(path, num_frames))
        elif isinstance(part.path, Media):
            media = part.path
        else:
            path = part.path
            media = await core().threads.call(lambda: load_media(path))
        with self.family.lock:
            self.images_ = [*self.images_, media]
            self.cur_images = [*self.cur_images, media]
            self._append_text("image", None, self.chat_template.image_token)
            self.events[-1].began_s = began

    # ---- requests ----

    def _params(self, part: ir.SglGen[Any]) -> SglSamplingParams:
        params = part.sampling_params.over(self.default_sampling_para)
        stops = params.stops
        stops += [stop for stop in self.chat_template.stop_str if stop not in stops]
        params.stop = stops
        return params

    async def _generate(self, part: ir.SglGen[Any], reasoning: str | None) -> None:
        params = self._params(part)
        splitter = Splitter(reasoning, self.text_[self.cur_role_begin_pos :]) if reasoning else None
        if self._fills is not None:
            self._fills.append(_Fill(sampling_params=params, part=part, splitter=splitter))
            return
        await self._wait_for_prefix()
        event = self._begin_event("gen", part.name, params.set_fields())
        try:
            # Several answers are no one stream.
            if self.stream and (params.n or 1) == 1:
                await self._generate_stream(part, params, event, splitter)
            else:
                text, meta = await self.backend.async_generate(self, params)
                with self.family.lock:
                    event.meta = meta
                    self._end_event(event)
                    self._set_generated(part, text, meta, splitter)
                    event.end = len(self.text_)
                    self.family.notify()
        except BaseException as error:
            event.error = error
            raise
        finally:
            self._end_event(event)

    def _set_generated(
        self,
        part: ir.SglGen[Any],
        text: str | list[str],
        meta: Any,
        splitter: Splitter | None,
    ) -> None:
        """Append what was generated and set its variables; under the lock."""
        name = part.name
        texts = [text] if isinstance(text, str) else text
        reasonings: list[str] = []
        if splitter is not None:
            split = [splitter.fresh().whole(one) for one in texts]
            reasonings = [one.reasoning for one in split]
            texts = [one.content for one in split]
        self.text_ += texts[0]
        self._uncached_from = len(self.text_)
        is_one = isinstance(text, str)
        if name is not None:
            self.vars.set(name, texts[0] if is_one else texts, meta, part.parse)
            if splitter is not None:
                self.vars.set(f"{name}_reasoning_content", reasonings[0] if is_one else reasonings)

    async def _generate_stream(
        self,
        part: ir.SglGen[Any],
        params: SglSamplingParams,
        event: Event,
        splitter: Splitter | None,
    ) -> None:
        name = part.name
        content, reasoning = VariableStream(), VariableStream()
        if name is not None:
            with self.family.lock:
                self.vars.begin_stream(name, content)
                if splitter is not None:
                    self.vars.begin_stream(f"{name}_reasoning_content", reasoning)
        meta: Any = {}
        pieces = self.backend.async_generate_stream(self, params)
        try:
            async for delta, told in pieces:
                meta = told
                self._take_piece(delta, meta, event, splitter, content, reasoning)
        finally:
            # Not when it is collected: the request is aborted now.
            await _close(pieces)
        if splitter is not None:
            self._take_piece(None, meta, event, splitter, content, reasoning)
        with self.family.lock:
            self._end_event(event)
            if name is not None:
                self.vars.set(name, content.text, meta, part.parse)
                if splitter is not None:
                    self.vars.set(f"{name}_reasoning_content", reasoning.text)
            content.is_done = reasoning.is_done = True
            self.family.notify()

    def _take_piece(
        self,
        delta: str | None,
        meta: Any,
        event: Event,
        splitter: Splitter | None,
        content: VariableStream,
        reasoning: VariableStream,
    ) -> None:
        thought = ""
        if splitter is not None:
            split = splitter.finish() if delta is None else splitter.feed(delta)
            thought, delta = split.reasoning, split.content
        with self.family.lock:
            if event.first_s is None:
                event.first_s = time.perf_counter()
            self.text_ += delta or ""
            event.end = len(self.text_)
            event.meta = meta
            content.add(delta or "", meta)
            if thought:
                reasoning.add(thought, meta)
            self.family.notify()

    async def _select(self, part: ir.SglSelect, reasoning: str | None) -> None:
        await self._wait_for_prefix()
        event = self._begin_event("select", part.name, {"choices": part.choices})
        try:
            decision = await self.backend.async_select(
                self, part.choices, part.temperature, part.choices_method
            )
            with self.family.lock:
                self.text_ += decision.decision
                event.end = len(self.text_)
                event.meta = decision.meta_info
                self._end_event(event)
                if part.name is not None:
                    self.vars.set(part.name, decision.decision, decision.meta_info)
                    if reasoning:
                        self.vars.set(f"{part.name}_reasoning_content", "")
                self.family.notify()
        except BaseException as error:
            event.error = error
            raise
        finally:
            self._end_event(event)

    async def _fill_and_close(self, role: str, fills: list[_Fill]) -> None:
        self._fills = None
        gens = [fill for fill in fills if fill.part is not None]
        if gens:
            self.text_ = self.text_[: self.cur_role_begin_pos]
            await self._wait_for_prefix()
            event = self._begin_event("gen", None, {"parts": len(gens)})
            try:
                results = await self.backend.async_fill_turn(self, fills)
                with self.family.lock:
                    event.meta = [meta for _, meta in results]
                    self._end_event(event)
                    self._set_filled(fills, iter(results))
                    event.end = len(self.text_)
                    self.family.notify()
            except BaseException as error:
                event.error = error
                raise
            finally:
                self._end_event(event)
        self._close_role(role)

    def _set_filled(self, fills: list[_Fill], results: Iterator[Generated]) -> None:
        for fill in fills:
            if fill.part is None:
                self.text_ += fill.text or ""
            else:
                text, meta = next(results)
                self._set_generated(fill.part, text, meta, fill.splitter)

    async def _wait_for_prefix(self) -> None:
        waiting, self.first_request = self.first_request, None
        if waiting is not None:
            await waiting

    def _begin_event(self, kind: str, name: str | None, sampling: dict[str, Any]) -> Event:
        at = len(self.text_)
        event = Event(kind, name, at, at, time.perf_counter(), sampling=sampling)
        with self.family.lock:
            self.events.append(event)
        return event

    def _end_event(self, event: Event) -> None:
        """A request is over; counted before anybody can read what it made."""
        with self.family.lock:
            if event.ended_s is not None:
                return
            now = event.ended_s = time.perf_counter()
            if event.first_s is None:
                event.first_s = now
            self._uncached_from = len(self.text_)
            self.family.usage.add(event.meta, now - event.began_s)

    # ---- children ----

    def fork(self, size: int, position_ids_offset: list[int] | None = None) -> list[StreamExecutor]:
        """Children that begin as copies; all that is queued must have been executed.

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
            self.events.append(Event("fork", str(size), at, at, now, now, now))
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
        child._uncached_from = self._uncached_from
        return child

    @property
    def uncached_text(self) -> str:
        """What no request has held yet."""
        return self.text_[self._uncached_from :]

    # ---- readers of its streams ----

    def add_reader(self) -> None:
        """Somebody begins to read a stream."""
        with self.family.lock:
            self._num_readers += 1

    def drop_reader(self, *, has_left: bool) -> None:
        """A reader is done; one that left early, and was the last, ends the program."""
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
        subject = f"The variable {variable!r} could not be made" if variable else f"{part!r} failed"
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
        """Whether nothing is queued, and nothing can come but by the caller; under the lock."""
        return not self.is_running and (own_body or self.family.body_done)

    def when_idle(self) -> Callable[[], bool]:
        """`is_idle` for the caller."""
        own_body = self.family.is_own_body
        return lambda: self.is_idle(own_body=own_body)

    def when_settled(self, name: str) -> Callable[[], bool]:
        """Whether the variable is set for good, or never will be; as the caller sees it."""
        own_body = self.family.is_own_body

        def is_settled() -> bool:
            if self.vars.is_expected(name):
                return False
            if name in self.vars.values or self.error_ is not None:
                return True
            return own_body or self.family.body_done

        return is_settled

    def take(self, name: str) -> Any:
        """The variable's value, once it is settled.

        Raises:
            ProgramError: it was never set.
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
            f"The variable {name!r} was not made, as the program failed before: {error}",
            variable=name,
        ) from error


class _Fill:
    """A part of a turn that one call fills; see `TurnPart`."""

    __slots__ = ("part", "sampling_params", "splitter", "text")

    def __init__(
        self,
        *,
        text: str | None = None,
        sampling_params: SglSamplingParams | None = None,
        part: ir.SglGen[Any] | None = None,
        splitter: Splitter | None = None,
    ) -> None:
        self.text = text
        self.sampling_params = sampling_params
        self.part = part
        self.splitter = splitter


def _steps(expression: ir.SglExpr) -> list[Step]:
    """The parts in order; a `separate_reasoning` becomes a mark of its generation."""
    parts = list(expression.parts())
    reasoning = {
        part.name: part.model_type for part in parts if isinstance(part, ir.SglSeparateReasoning)
    }
    steps: list[Step] = []
    for part in parts:
        if isinstance(part, ir.SglSeparateReasoning):
            continue
        name = part.name if isinstance(part, (ir.SglGen, ir.SglSelect)) else None
        steps.append((part, reasoning.get(name) if name else None))
    return steps


async def _close(pieces: AsyncIterator[Any]) -> None:
    close = getattr(pieces, "aclose", None)
    if close is not None:
        await close()
