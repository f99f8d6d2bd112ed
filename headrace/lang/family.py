"""The state that a program shares with its forked children: one lock, and the waiting readers.

The frontend's event loop and the program's function (its body) change this state. A reader
registers a condition and is woken when the condition holds. Every condition must hold at the latest
when the program ends, so that no reader waits longer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

from headrace.lang.events import Usage
from headrace.lang.waiters import Waiters

# The runs of programs whose bodies are on the caller's stack, the outermost first.
_bodies: ContextVar[tuple[Family, ...]] = ContextVar("headrace_bodies", default=())


class Family(Waiters):
    """The state of one run of a program, shared with its children.

    Attributes:
        name: name of the program's function, or None.
        body_done: whether the function has returned or raised.
        body_error: the exception that the function raised, or None.
        ret_value: the value that the function returned.
        usage: totals of all generations, including those of the children.
        on_block: called before a thread that runs the function waits, if it is set.
    """

    __slots__ = ("body_done", "body_error", "name", "on_block", "ret_value", "usage")

    def __init__(self, name: str | None, *, has_body: bool) -> None:
        """Begin a run; without a body, the body counts as done."""
        super().__init__()
        self.name = name
        self.body_done = not has_body
        self.body_error: BaseException | None = None
        self.ret_value: Any = None
        self.usage = Usage()
        self.on_block: Callable[[], None] | None = None

    def as_body(self) -> _AsBody:
        """Return a context manager; code inside its block counts as the program's body."""
        return _AsBody(self)

    @property
    def is_own_body(self) -> bool:
        """Whether the caller is the program's body, which must not wait for its own end."""
        return self in _bodies.get()

    def finish_body(self, value: Any, error: BaseException | None) -> None:
        """Record that the function has returned `value` or raised `error`, and wake readers."""
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
