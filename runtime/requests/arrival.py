"""Times of an HTTP request in the front process: its arrival, and the work before the engine."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Literal, Self

# The kinds of work of the front process before the engine gets a request, in order. The time of
# `files` (reading image files) is part of the time of `images`.
FrontWork = Literal["body", "parse", "adapter", "render", "tokenize", "images", "files"]
# Seconds. A write to the socket that returns sooner did not have to wait for the client.
BLOCKED_S = 0.001


class Arrival:
    """Times of one HTTP request, which may become several requests to the engine.

    Attributes:
        http_id: the id that the response has in its header `x-request-id`.
        began_at: when the request arrived, `time.monotonic()`.
        spent_s: seconds of each kind of work, by the kinds of `FrontWork`.
        system: the chat's first system message; empty if there is none.
        blocked_s: seconds in which the socket took no more of a stream, because the client did not
            read.
        closed_at: when the response was complete, `time.monotonic()`; 0 before.
    """

    __slots__ = ("began_at", "blocked_s", "closed_at", "http_id", "spent_s", "system")

    def __init__(self, http_id: str) -> None:
        """Set the time of arrival to now."""
        self.http_id = http_id
        self.began_at = time.monotonic()
        self.spent_s: dict[FrontWork, float] = {}
        self.system = ""
        self.blocked_s = 0.0
        self.closed_at = 0.0


# The current request's times, set by the HTTP entry. It is `None` for the offline engine and for
# background work.
ARRIVAL: ContextVar[Arrival | None] = ContextVar("arrival", default=None)


class timed:
    """Adds the duration of a `with` block to the times of the current HTTP request, if any."""

    __slots__ = ("_since", "_work")

    def __init__(self, work: FrontWork) -> None:
        """Count the block's time as `work`."""
        self._work = work

    def __enter__(self) -> Self:
        self._since = time.monotonic()
        return self

    def __exit__(self, *raised: object) -> None:
        arrival = ARRIVAL.get()
        if arrival is not None:
            spent_s = arrival.spent_s
            spent_s[self._work] = spent_s.get(self._work, 0.0) + time.monotonic() - self._since
