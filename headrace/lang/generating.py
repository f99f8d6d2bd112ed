"""The steps of a program that send requests: generations, selections, and whole turns.

These functions run on the frontend's event loop; each executor runs one of them at a time.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from headrace.lang import ir
from headrace.lang.events import Event
from headrace.lang.sampling import SglSamplingParams
from headrace.lang.variables import Splitter, VariableStream

if TYPE_CHECKING:
    from headrace.lang.backend.base import Generated
    from headrace.lang.executor import StreamExecutor


class Fill:
    """A `TurnPart`: a constant or a generation in a turn that one request generates as a whole."""

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


def _params_of(executor: StreamExecutor, part: ir.SglGen[Any]) -> SglSamplingParams:
    params = part.sampling_params.over(executor.default_sampling_para)
    stops = params.stops
    stops += [stop for stop in executor.chat_template.stop_str if stop not in stops]
    params.stop = stops
    return params


async def generate(executor: StreamExecutor, part: ir.SglGen[Any], reasoning: str | None) -> None:
    """Run a generation, append its text and set its variable.

    `reasoning` is the name of a parser that separates the reasoning, or None.
    """
    params = _params_of(executor, part)
    turn = executor.text_[executor.cur_role_begin_pos :]
    splitter = Splitter(reasoning, turn) if reasoning else None
    if executor.fills is not None:
        executor.fills.append(Fill(sampling_params=params, part=part, splitter=splitter))
        return
    await _wait_for_prefix(executor)
    with _Request(executor, "gen", part.name, params) as event:
        # A generation with several answers cannot be streamed as one text.
        if executor.stream and (params.n or 1) == 1:
            await _generate_stream(executor, part, params, event, splitter)
            return
        text, meta = await executor.backend.async_generate(executor, params)
        with executor.family.lock:
            event.meta = meta
            _end_event(executor, event)
            _set_generated(executor, part, text, meta, splitter)
            event.end = len(executor.text_)
            executor.family.notify()


def _set_generated(
    executor: StreamExecutor,
    part: ir.SglGen[Any],
    text: str | list[str],
    meta: Any,
    splitter: Splitter | None,
) -> None:
    """Append the generated text and set its variables; the caller must hold the lock."""
    name = part.name
    texts = [text] if isinstance(text, str) else text
    reasonings: list[str] = []
    if splitter is not None:
        split = [splitter.fresh().whole(one) for one in texts]
        reasonings = [one.reasoning for one in split]
        texts = [one.content for one in split]
    executor.text_ += texts[0]
    executor.uncached_from = len(executor.text_)
    is_one = isinstance(text, str)
    if name is not None:
        executor.vars.set(name, texts[0] if is_one else texts, meta, part.parse)
        if splitter is not None:
            executor.vars.set(f"{name}_reasoning_content", reasonings[0] if is_one else reasonings)


async def _generate_stream(
    executor: StreamExecutor,
    part: ir.SglGen[Any],
    params: SglSamplingParams,
    event: Event,
    splitter: Splitter | None,
) -> None:
    name = part.name
    content, reasoning = VariableStream(), VariableStream()
    if name is not None:
        with executor.family.lock:
            executor.vars.begin_stream(name, content)
            if splitter is not None:
                executor.vars.begin_stream(f"{name}_reasoning_content", reasoning)
    meta: Any = {}
    pieces = executor.backend.async_generate_stream(executor, params)
    try:
        async for delta, told in pieces:
            meta = told
            _take_piece(executor, delta, meta, event, splitter, content, reasoning)
    finally:
        # The generator is closed here, which aborts the request; garbage collection would do so
        # later.
        await _close(pieces)
    if splitter is not None:
        _take_piece(executor, None, meta, event, splitter, content, reasoning)
    with executor.family.lock:
        _end_event(executor, event)
        if name is not None:
            executor.vars.set(name, content.text, meta, part.parse)
            if splitter is not None:
                executor.vars.set(f"{name}_reasoning_content", reasoning.text)
        content.is_done = reasoning.is_done = True
        executor.family.notify()


def _take_piece(
    executor: StreamExecutor,
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
    with executor.family.lock:
        if event.first_s is None:
            event.first_s = time.perf_counter()
        executor.text_ += delta or ""
        event.end = len(executor.text_)
        event.meta = meta
        content.add(delta or "", meta)
        if thought:
            reasoning.add(thought, meta)
        executor.family.notify()


async def select(executor: StreamExecutor, part: ir.SglSelect, reasoning: str | None) -> None:
    """Run a `select`: let the back end choose a text, append it and set the variable."""
    await _wait_for_prefix(executor)
    with _Request(executor, "select", part.name, {"choices": part.choices}) as event:
        decision = await executor.backend.async_select(
            executor, part.choices, part.temperature, part.choices_method
        )
        with executor.family.lock:
            executor.text_ += decision.decision
            event.end = len(executor.text_)
            event.meta = decision.meta_info
            _end_event(executor, event)
            if part.name is not None:
                executor.vars.set(part.name, decision.decision, decision.meta_info)
                if reasoning:
                    executor.vars.set(f"{part.name}_reasoning_content", "")
            executor.family.notify()


async def fill_and_close(executor: StreamExecutor, role: str, fills: list[Fill]) -> None:
    """Generate all parts of a turn by one request, then end the turn."""
    executor.fills = None
    gens = [fill for fill in fills if fill.part is not None]
    if gens:
        executor.text_ = executor.text_[: executor.cur_role_begin_pos]
        await _wait_for_prefix(executor)
        with _Request(executor, "gen", None, {"parts": len(gens)}) as event:
            results = await executor.backend.async_fill_turn(executor, fills)
            with executor.family.lock:
                event.meta = [meta for _, meta in results]
                _end_event(executor, event)
                _set_filled(executor, fills, iter(results))
                event.end = len(executor.text_)
                executor.family.notify()
    executor.close_role(role)


def _set_filled(executor: StreamExecutor, fills: list[Fill], results: Iterator[Generated]) -> None:
    for fill in fills:
        if fill.part is None:
            executor.text_ += fill.text or ""
        else:
            text, meta = next(results)
            _set_generated(executor, fill.part, text, meta, fill.splitter)


async def _wait_for_prefix(executor: StreamExecutor) -> None:
    waiting, executor.first_request = executor.first_request, None
    if waiting is not None:
        await waiting


class _Request:
    """A context manager that records the event of one request; the event ends with the block."""

    __slots__ = ("_event", "_executor")

    def __init__(
        self,
        executor: StreamExecutor,
        kind: str,
        name: str | None,
        asked: SglSamplingParams | dict[str, Any],
    ) -> None:
        at = len(executor.text_)
        self._executor = executor
        self._event = Event(kind, name, at, at, time.perf_counter(), asked=asked)

    def __enter__(self) -> Event:
        with self._executor.family.lock:
            self._executor.log.append(self._event)
        return self._event

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._event.error = error
        _end_event(self._executor, self._event)


def _end_event(executor: StreamExecutor, event: Event) -> None:
    """End the event of a request and add it to the usage; called before the result can be read."""
    with executor.family.lock:
        if event.ended_s is not None:
            return
        now = event.ended_s = time.perf_counter()
        if event.first_s is None:
            event.first_s = now
        executor.uncached_from = len(executor.text_)
        executor.family.usage.add(event.meta, now - event.began_s)


async def _close(pieces: AsyncIterator[Any]) -> None:
    close = getattr(pieces, "aclose", None)
    if close is not None:
        await close()
