"""The state that a program shares with its forked children: one lock, and the waiting readers.

Changes come from the core's loop or from the program's body. A waiter registers a condition and is
woken when the condition holds. Every wait ends at the latest when the program ends, so every
condition must hold then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

from headrace.lang.events import Usage
from headrace.lang.waiters import Waiters

# The programs whose bodies are running this code, the outermost first.
_bodies: ContextVar[tuple[Family, ...]] = ContextVar("headrace_bodies", default=())


class Family(Waiters):
    """One run of a program.

    Attributes:
        name: name of the function, or None.
        body_done: whether the function has returned, or raised.
        body_error: the exception that the function raised, or None.
        ret_value: the value that the function returned.
        usage: totals of all generations, including the children's.
        on_block: called before a thread of the body waits, if set.
    """

    __slots__ = ("body_done", "body_error", "name", "on_block", "ret_value", "usage")

    def __init__(self, name: str | None, *, has_body: bool) -> None:
        """Begin a run; a run without a body counts as done."""
        super().__init__()
        self.name = name
        self.body_done = not has_body
        self.body_error: BaseException | None = None
        self.ret_value: Any = None
        self.usage = Usage()
        self.on_block: Callable[[], None] | None = None

    def as_body(self) -> _AsBody:
        """Return a context; code that runs inside it is the program's body."""
        return _AsBody(self)

    @property
    def is_own_body(self) -> bool:
        """Whether the caller is the body, which must not wait for its own end."""
        return self in _bodies.get()

    def finish_body(self, value: Any, error: BaseException | None) -> None:
        """Record that the function returned or raised."""
        with self.lock:
            self.ret_value = value
            self.body_error = error
            self.body_done = True
            self.on_block = None
            self.notify()

    def about_to_block(self) -> None:
        for family in _bodies.get():
            if family.on_block is not None:
                family.on_block()


class _AsBody:
    __slots__ = ("_family", "_token")

    def __init__(self, family: Family) -> None:
        self._family = family

    def __enter__(self) -> None:
        self._token: Token[tuple[Family, ...]] = _bodies.set((*_bodies.get(), self._family))

    def __exit__(self, *raised: object) -> None:
        _bodies.reset(self._token)
