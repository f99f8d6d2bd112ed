"""The executed steps of a program with their times, from which `explain` makes its report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.lang.sampling import SglSamplingParams

_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")


@dataclass(slots=True)
class Event:
    """One executed step of a program, such as a text or a generation.

    Attributes:
        kind: "text", "role_begin", "role_end", "image", "gen", "select", "cache_prefix" or "fork".
        name: name of the variable or of the role.
        start: offset in the program's text at which the step's text begins.
        end: offset at which the step's text ends; it grows while the step streams.
        began_s: when the step began, in seconds of `time.perf_counter()`.
        first_s: when the first piece came, or None.
        ended_s: when the step ended, or None while it runs.
        asked: the sampling parameters of a generation, or the options of a `select` by name.
        meta: the back end's meta information about the request.
        error: the error of the step, or None.
    """

    kind: str
    name: str | None
    start: int
    end: int
    began_s: float
    first_s: float | None = None
    ended_s: float | None = None
    asked: SglSamplingParams | dict[str, Any] | None = None
    meta: Any = None
    error: BaseException | None = None

    @property
    def sampling(self) -> dict[str, Any] | None:
        """The options of the request by name; None for a step that sends no request."""
        return self.asked.set_fields() if isinstance(self.asked, SglSamplingParams) else self.asked


Mark = tuple[str, str | None, int, int, float, float]
"""A finished event: kind, name, start, end, when it began and when it ended.

Most events are marks, and a program keeps all of its events. The garbage collector does not
traverse a tuple of plain values.
"""


def as_event(one: Event | Mark) -> Event:
    """Convert a mark, the short form of a step without a request, to an `Event`."""
    if isinstance(one, Event):
        return one
    kind, name, start, end, began_s, ended_s = one
    return Event(kind, name, start, end, began_s, ended_s, ended_s)


@dataclass(slots=True)
class Usage:
    """Totals over a program's requests; a number that the back end does not report counts as 0.

    Attributes:
        num_requests: generations and selections.
        prompt_tokens: tokens of the requests' prompts, including cached ones.
        cached_tokens: prompt tokens that came from the cache.
        completion_tokens: generated tokens.
        seconds: sum of the times that the requests took.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    @property
    def total_tokens(self) -> int:
        """The number of tokens of prompts and completions together."""
        return self.prompt_tokens + self.completion_tokens

    def add(self, meta: Any, seconds: float) -> None:
        """Add one request to the totals.

        Args:
            meta: the back end's meta information; a list if the request has several answers.
            seconds: the time that the request took.
        """
        self.num_requests += 1
        self.seconds += seconds
        metas = meta if isinstance(meta, list) else [meta]
        for index, one in enumerate(metas):
            if not isinstance(one, dict):
                continue
            for name in _COUNTS:
                # Several answers share one prompt: count it once.
                if index == 0 or name == "completion_tokens":
                    value = one.get(name)
                    if isinstance(value, (int, float)):
                        setattr(self, name, getattr(self, name) + int(value))
