"""Children of a program, as a group."""

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

# A shorter common text is not cached first, because computing it again costs almost no time.
MIN_PREFIX_CHARS = 64
# How long the children's requests wait for their common text to be cached. If caching takes longer,
# the server is computing the text by then and lets the requests share it.
_WARM_TIMEOUT_S = 0.05


def fork_and_warm(
    executor: StreamExecutor, size: int, position_ids_offset: list[int] | None
) -> list[StreamExecutor]:
    """Fork an idle program; one request caches the children's common text.

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
    """Caches a text. Other requests await it for a short time, and report its errors themselves."""

    def __init__(self, work: Callable[[], Awaitable[None]], timeout_s: float = _WARM_TIMEOUT_S):
        """Prepare; `start` begins the work."""
        self._work = work
        self._timeout_s = timeout_s
        self._started = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin caching; called on the core's loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._started.set()

    async def _run(self) -> None:
        # The children's own requests meet the same error and report it.
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
        # `group[i] += x` assigns the same object that it read, which is allowed.
        if value is not self.states[index]:
            raise ValueError("A child cannot be replaced; append to it.")

    def __iadd__(self, other: Any) -> Self:
        """Append to each child: text, an expression, a function of the index, or one for each.

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
    """Children of a program that is a plain function."""

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for all children, and take over their variables or their texts.

        Args:
            mode: `gather_variable` collects the children's values of each variable that the parent
                lacks into a list; `concate_and_append` appends the children's texts in order.

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
    """Children of a program that is `async def`."""

    async def join(self, mode: str = "gather_variable") -> None:
        """See `ProgramStateGroup.join`."""
        if self.src_state is not None:
            await self.src_state.sync()
        self._check(mode)
        for state in self.states:
            await state.sync()
        self._gather(mode)
