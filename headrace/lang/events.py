"""What a program did and when: for its usage, for explaining it, for records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.lang.sampling import SglSamplingParams

_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")


@dataclass(slots=True)
class Event:
    """Something that was executed.

    Attributes:
        kind: "text", "role_begin", "role_end", "image", "gen", "select", "cache_prefix" or "fork".
        name: of the variable, or of the role.
        start: offset in the program's text where its text begins.
        end: offset behind its text; for the last one it grows while it streams.
        began_s: when it was begun, in seconds of `time.perf_counter()`.
        first_s: when its first piece came, or None.
        ended_s: when it was done, or None while it runs.
        asked: of a generation its sampling parameters, of a choice its options by name.
        meta: the back end's meta information.
        error: what went wrong.
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
        """What was asked for, by name; None where nothing is generated."""
        return self.asked.set_fields() if isinstance(self.asked, SglSamplingParams) else self.asked


Mark = tuple[str, str | None, int, int, float, float]
"""An event that is over: kind, name, start, end, when it was begun and done.

Most are that, and a program keeps all of its own: a tuple of plain values is nothing that the
garbage collector walks through.
"""


def as_event(one: Event | Mark) -> Event:
    """The event of a mark."""
    if isinstance(one, Event):
        return one
    kind, name, start, end, began_s, ended_s = one
    return Event(kind, name, start, end, began_s, ended_s, ended_s)


@dataclass(slots=True)
class Usage:
    """Totals over a program's requests; 0 where a back end does not tell.

    Attributes:
        num_requests: generations and selections.
        prompt_tokens: of the requests' prompts, cached ones included.
        cached_tokens: of those, what was not computed anew.
        completion_tokens: generated.
        seconds: of waiting for the back end, summed.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens

    def add(self, meta: Any, seconds: float) -> None:
        """Count one request; a list of meta information is one request with several answers."""
        self.num_requests += 1
        self.seconds += seconds
        metas = meta if isinstance(meta, list) else [meta]
        for index, one in enumerate(metas):
            if not isinstance(one, dict):
                continue
            for name in _COUNTS:
                # The prompt of several answers is one.
                if index == 0 or name == "completion_tokens":
                    value = one.get(name)
                    if isinstance(value, (int, float)):
                        setattr(self, name, getattr(self, name) + int(value))
