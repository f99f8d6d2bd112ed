"""Runs one program many times, with as many runs at a time as the server can use.

Plain functions run in one thread, one after the other, because most of them only append and return.
When a function waits for a variable, or takes long, another thread continues with the next
function.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from headrace.lang.batch_bar import ProgressBar
from headrace.lang.core_loop import core
from headrace.lang.global_config import global_config
from headrace.lang.prefix import PrefixGate
from headrace.lang.program_errors import is_failed_generation
from headrace.lang.sampling import SglSamplingParams
from headrace.lang.waiters import Waiters

if TYPE_CHECKING:
    from headrace.lang.backend.base import BaseBackend
    from headrace.lang.function import Call, SglFunction
    from headrace.lang.state import ProgramState

# The most programs that run at a time by default. More programs would only wait in the server's
# queue or for a connection.
AUTO_LIVE = 512
# How many elements of an iterator may be read before the results of earlier ones are consumed.
AHEAD = 200
_SLOW_BODY_S = 0.01
# Seconds. Programs that end within this time are replaced together, because each wake-up of the
# thread that starts programs costs two switches between threads that share the GIL.
_GATHER_S = 0.002

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class BatchOptions:
    """The options of `SglFunction.run_batch`."""

    num_threads: int | str = "auto"
    progress_bar: bool = False
    generator_style: bool = False
    return_exceptions: bool = False
    timeout: float | None = None

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> Self:
        """Remove the options of `run_batch` from `options` and return them.

        Raises:
            ValueError: `num_threads` is not a valid number.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        own = cls(**{name: options.pop(name) for name in names if name in options})
        number = own.num_threads
        if number != "auto" and not (isinstance(number, int) and number > 0):
            raise ValueError(f"num_threads is 'auto' or a number from 1 on, not {number!r}.")
        return own

    @property
    def max_live(self) -> int:
        """How many programs run at a time."""
        return AUTO_LIVE if isinstance(self.num_threads, str) else self.num_threads

    @property
    def max_threads(self) -> int:
        """How many threads may run functions of the batch, including threads that wait."""
        if isinstance(self.num_threads, str):
            return max(96, 16 * (os.cpu_count() or 1))
        return self.num_threads


def arguments_of(function: SglFunction[..., Any], index: int, element: Any) -> Arguments:
    """Return the positional and keyword arguments that one element of a batch describes.

    Raises:
        TypeError: the element is not a dictionary, record or sequence, or does not fit the
            function.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    names = getattr(getattr(element, "dtype", None), "names", None)
    if isinstance(element, Mapping):
        kwargs = dict(element)
    elif names:
        # A NumPy record.
        kwargs = {name: element[name] for name in names}
    elif hasattr(element, "to_dict"):
        # A pandas row.
        kwargs = dict(element.to_dict())
    elif hasattr(element, "_asdict"):
        fields = element._asdict()
        kwargs = {name: fields[name] for name in fields if name in function.arg_names}
    elif isinstance(element, (str, bytes)) or not hasattr(element, "__iter__"):
        raise TypeError(
            f"Element {index} of the batch is {element!r}: give a dictionary of arguments or a "
            "sequence of them."
        )
    else:
        args = tuple(element)
    try:
        function.check_arguments(args, kwargs)
    except TypeError as error:
        raise TypeError(f"Element {index} of the batch does not fit: {error}.") from None
    return args, kwargs


class Batch:
    """One call of `run_batch`: it starts the programs and collects their states."""

    def __init__(
        self,
        function: SglFunction[..., Any],
        elements: Iterable[Any],
        defaults: SglSamplingParams,
        backend: BaseBackend,
        options: BatchOptions,
    ) -> None:
        """Store the settings and check all elements, unless they come from an iterator.

        Raises:
            TypeError: an element does not fit the function.
        """
        if isinstance(elements, (str, bytes, Mapping)):
            raise TypeError("run_batch takes the elements as a list, a tuple or an iterator.")
        self.options = options
        self._function = function
        self._defaults = defaults
        self._backend = backend
        numbered = (
            arguments_of(function, index, element) for index, element in enumerate(elements)
        )
        self._total: int | None = None
        if not options.generator_style:
            listed = list(numbered)
            self._total = len(listed)
            self._elements: Iterator[Arguments] = iter(listed)
        else:
            if isinstance(elements, Sequence):
                self._total = len(elements)
            self._elements = numbered
        self._waiters = Waiters()
        self._states: dict[int, ProgramState] = {}
        self._done: set[int] = set()
        self._num_started = 0
        self._num_delivered = 0
        self._num_running = 0
        self._num_threads = 0
        self._num_free = 0
        self._is_exhausted = self._total == 0
        self._is_stopped = False
        self._will_tell = False
        self._read_error: BaseException | None = None
        self._bar = ProgressBar(self._total) if options.progress_bar else None
        caches = backend.caches_prefixes and global_config.enable_precache_with_tracing
        wants_gate = caches and self._total != 1 and options.max_live > 1
        self._gate = PrefixGate(backend) if wants_gate else None

    # ---- taking the results ----

    def run(self) -> list[Any]:
        """Run all programs, wait for them and return their states in order."""
        try:
            self._begin()
            self._waiters.wait(self._is_over)
        finally:
            self._end()
        return self._results()

    async def run_async(self) -> list[Any]:
        """Do the same as `run`, but as a coroutine of any event loop."""
        try:
            self._begin()
            await self._waiters.wait_async(self._is_over)
        finally:
            self._end()
        return self._results()

    def iterate(self) -> Iterator[Any]:
        """Yield the states in order, as they are done; leaving the loop early cancels the rest."""
        try:
            self._begin()
            for index in itertools.count():
                self._waiters.wait(lambda i=index: i in self._done or self._is_over())  # type: ignore[misc]
                with self._waiters.lock:
                    if index not in self._done:
                        break
                    state = self._states.pop(index)
                    self._done.discard(index)
                    self._num_delivered += 1
                    self._waiters.notify()
                yield self._result(index, state)
            if self._read_error is not None:
                raise self._read_error
        finally:
            self._end()

    def _results(self) -> list[Any]:
        return [self._result(index, self._states[index]) for index in range(self._num_started)]

    def _result(self, index: int, state: ProgramState) -> Any:
        error = state.stream_executor.family.body_error
        if error is None or is_failed_generation(error):
            return state
        if self.options.return_exceptions:
            return error
        error.add_note(f"Raised by element {index} of the batch.")
        raise error

    def _is_over(self) -> bool:
        return self._num_running == 0 and (self._is_exhausted or self._is_stopped)

    def _end(self) -> None:
        with self._waiters.lock:
            self._is_stopped = True
            left = [state for index, state in self._states.items() if index not in self._done]
            self._waiters.notify()
        if self._gate is not None:
            core().call_soon(self._gate.open)
        for state in left:
            state.cancel()
        if self._bar is not None:
            self._bar.close()

    # ---- starting the programs ----

    def _begin(self) -> None:
        if self._is_exhausted:
            return
        if self._function.is_async:
            core().submit(self._feed())
        else:
            self._add_thread()
            core().call_soon(self._look)

    def _has_room(self) -> bool:
        if self._is_stopped or self._is_exhausted:
            return True
        if self.options.generator_style and self._num_started - self._num_delivered >= AHEAD:
            return False
        return self._num_running < self.options.max_live

    def _next(self) -> tuple[Call, ProgramState] | None:
        """Register and return the next program to start, or None if all are started."""
        from headrace.lang.function import Call

        with self._waiters.lock:
            if self._is_stopped or self._is_exhausted:
                return None
            try:
                args, kwargs = next(self._elements)
            except BaseException as error:
                # The user's iterator may raise any exception; then no more programs are started.
                self._is_exhausted = True
                if not isinstance(error, StopIteration):
                    self._read_error = error
                if self._gate is not None and self._num_started < 2:
                    core().call_soon(self._gate.open)
                self._waiters.notify()
                return None
            call = Call(
                *(self._function, args, kwargs, self._defaults, self._backend),
                timeout_s=self.options.timeout,
            )
            state = call.new_state()
            index = self._num_started
            self._num_started += 1
            self._num_running += 1
            self._states[index] = state
            # The end is recorded now; otherwise a thread would wait for another program.
            self._is_exhausted = self._num_started == self._total
        executor = state.stream_executor
        if self._gate is not None:
            executor.first_request = self._gate.ticket(executor)
        executor.family.call_when(
            lambda: executor.is_idle(own_body=False), lambda: self._finish(index)
        )
        return call, state

    def _finish(self, index: int) -> None:
        with self._waiters.lock:
            self._num_running -= 1
            self._done.add(index)
            will_tell, self._will_tell = self._will_tell, True
        if not will_tell:
            core().call_soon(self._tell_later)
        if self._bar is not None:
            self._bar.advance()

    def _tell_later(self) -> None:
        asyncio.get_running_loop().call_later(_GATHER_S, self._tell)

    def _tell(self) -> None:
        """Wake the thread that starts programs, and the consumer of the results."""
        with self._waiters.lock:
            self._will_tell = False
            self._waiters.notify()

    # ---- bodies that are plain functions: in threads ----

    def _add_thread(self) -> None:
        with self._waiters.lock:
            if self._is_stopped or self._is_exhausted:
                return
            if self._num_threads >= self.options.max_threads:
                return
            self._num_threads += 1
            self._num_free += 1
        context = contextvars.copy_context()
        core().threads.start(lambda: context.run(self._work))

    def _work(self) -> None:
        while True:
            self._waiters.wait(self._has_room)
            with self._waiters.lock:
                found = self._next()
                if found is None:
                    self._num_threads -= 1
                    self._num_free -= 1
                    return
                self._num_free -= 1
            call, state = found
            state.stream_executor.family.on_block = self._on_block
            call.run_body(state)
            with self._waiters.lock:
                self._num_free += 1
            del call, state, found

    def _on_block(self) -> None:
        if self._num_free == 0:
            self._add_thread()

    def _look(self, num_started: int = -1) -> None:
        """Add a thread if all threads are busy and no program has started since the last call.

        It is called every few milliseconds.
        """
        if self._is_stopped or self._is_exhausted:
            return
        if self._num_free == 0 and self._num_started == num_started:
            self._add_thread()
        loop = asyncio.get_running_loop()
        loop.call_later(_SLOW_BODY_S, self._look, self._num_started)

    # ---- bodies that are coroutines: on the core's loop ----

    async def _feed(self) -> None:
        while True:
            await self._waiters.wait_async(self._has_room)
            found = self._next()
            if found is None:
                return
            call, state = found
            call.keep(asyncio.create_task(call.run_async(state)))
