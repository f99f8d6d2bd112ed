"""Forks a program into children, and collects them in a group."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from headrace.lang.core_loop import core
from headrace.lang.executor import StreamExecutor

if TYPE_CHECKING:
    from headrace.lang.state import AsyncProgramState, ProgramState, _State  # noqa: F401  in quotes

S = TypeVar("S", bound="_State")

# A shorter common text is not cached before the children run: computing it again costs little.
MIN_PREFIX_CHARS = 64
# Seconds that the children's requests wait for their common text to be cached. If caching takes
# longer, the server is already computing the text, and the requests will share it.
_WARM_TIMEOUT_S = 0.05


def fork_and_warm(
    executor: StreamExecutor, size: int, position_ids_offset: list[int] | None
) -> list[StreamExecutor]:
    """Create children of an idle program, and start to cache the text that they share.

    Raises:
        TypeError: `size` is not a number.
    """
    if not isinstance(size, int):
        raise TypeError(f"fork takes the number of children, not {size!r}.")
    children = executor.fork(size, position_ids_offset)
    backend = executor.backend
    if (
        size > 1
        and backend.caches_prefixes
        and len(executor.uncached_text) > MIN_PREFIX_CHARS
        and executor.error_ is None
    ):
        warm = Warming(lambda: backend.async_cache_prefix(executor.text_, executor.images_))
        core().call_soon(warm.start)
        for child in children:
            child.first_request = warm
    return children


class Warming:
    """Caches a text that several requests begin with; the requests await this object.

    They wait only for a limited time. Errors of caching are ignored, because the requests
    themselves then get the same error.
    """

    def __init__(self, work: Callable[[], Awaitable[None]], timeout_s: float = _WARM_TIMEOUT_S):
        """Store the work and the longest wait in seconds; `start` begins the work."""
        self._work = work
        self._timeout_s = timeout_s
        self._started = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to cache the text; called on the frontend's event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._started.set()

    async def _run(self) -> None:
        # An error is ignored here, because the children's own requests report the same error.
        with contextlib.suppress(Exception):
            await self._work()

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> None:
        await self._started.wait()
        assert self._task is not None
        await asyncio.wait([self._task], timeout=self._timeout_s)


class _Group(Generic[S]):
    def __init__(self, states: Sequence[S], src_state: S | None = None) -> None:
        """Hold `states`, the children of `src_state`."""
        self.states = list(states)
        self.src_state = src_state

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[S]:
        return iter(self.states)

    def __getitem__(self, index: int) -> S:
        return self.states[index]

    def __setitem__(self, index: int, value: S) -> None:
        # `group[i] += x` assigns the object that it has read, so this assignment is allowed.
        if value is not self.states[index]:
            raise ValueError("A child cannot be replaced; append to it.")

    def __iadd__(self, other: Any) -> Self:
        """Append to each child.

        `other` is a text or an expression for all children, a function of the child's index, or a
        list with one value for each child.

        Raises:
            ValueError: the number of values differs from the number of children.
        """
        values: Sequence[Any]
        if isinstance(other, (list, tuple)):
            if len(other) != len(self.states):
                raise ValueError(
                    f"{len(other)} values for {len(self.states)} children: give one for each."
                )
            values = other
        elif callable(other):
            values = [other(index) for index in range(len(self.states))]
        else:
            values = [other] * len(self.states)
        for state, value in zip(self.states, values, strict=True):
            state += value
        return self

    def _gather(self, mode: str) -> None:
        if self.src_state is None:
            raise ValueError("This group has no parent to join.")
        parent = self.src_state.stream_executor
        children = [state.stream_executor for state in self.states]
        if mode == "gather_variable":
            _gather_variables(parent, children)
        else:
            parent.submit("".join(child.text_[child.fork_start_text_pos :] for child in children))

    def _check(self, mode: str) -> None:
        if mode not in ("gather_variable", "concate_and_append"):
            raise ValueError(f"join takes gather_variable or concate_and_append, not {mode!r}.")
        if mode == "concate_and_append" and self.src_state is not None:
            parent = self.src_state.stream_executor
            starts = {state.stream_executor.fork_start_text_pos for state in self.states}
            if starts - {len(parent.text_)}:
                raise ValueError("concate_and_append: the parent was appended to since the fork.")


def _gather_variables(parent: StreamExecutor, children: Sequence[StreamExecutor]) -> None:
    with parent.family.lock:
        names = dict.fromkeys(name for child in children for name in child.vars.values)
        for name in names:
            if name not in parent.vars.values:
                parent.vars.values[name] = [
                    child.vars.values[name] for child in children if name in child.vars.values
                ]
        parent.family.notify()


class ProgramStateGroup(_Group["ProgramState"]):
    """The children of a program that is a plain function."""

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for all children, and copy their variables or their texts to the parent.

        Args:
            mode: with `gather_variable`, each variable that the parent lacks becomes a list of the
                children's values; with `concate_and_append`, the children's texts are appended to
                the parent in order.

        Raises:
            ValueError: another mode, or the parent was appended to since the fork.
        """
        if self.src_state is not None:
            self.src_state.sync()
        self._check(mode)
        for state in self.states:
            state.sync()
        self._gather(mode)


class AsyncProgramStateGroup(_Group["AsyncProgramState"]):
    """The children of a program that is an `async def` function."""

    async def join(self, mode: str = "gather_variable") -> None:
        """Await all children, and copy their results as `ProgramStateGroup.join` does."""
        if self.src_state is not None:
            await self.src_state.sync()
        self._check(mode)
        for state in self.states:
            await state.sync()
        self._gather(mode)
