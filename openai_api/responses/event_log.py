"""Keeps the events of background responses, so that clients can read them from any one on."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from runtime.client.tenant import TENANT, next_to_yield

# The most bytes of all complete logs together. Logs that still grow are not limited.
MAX_BYTES = 32 * 2**20


@dataclass
class EventLog:
    """The encoded events of one response, in order; an event's index is its sequence number.

    Attributes:
        owner: the tenant that owns the response.
        events: the events.
        is_over: whether the log is complete.
        num_bytes: number of bytes of all events.
    """

    owner: str = ""
    events: list[bytes] = field(default_factory=list)
    is_over: bool = False
    num_bytes: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def add(self, event: bytes) -> None:
        """Append an event, and wake waiting readers."""
        self.events.append(event)
        self.num_bytes += len(event)
        await self._wake()

    async def end(self) -> None:
        """Mark the log as complete."""
        self.is_over = True
        await self._wake()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """Yield the events from index `start` on as they are added, up to the last one."""
        while True:
            if start < len(self.events):
                ready, start = self.events[start:], len(self.events)
                yield b"".join(ready)
            elif self.is_over:
                return
            else:
                await self._more_than(start)

    async def _more_than(self, num_events: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.is_over or num_events < len(self.events))

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class EventLogs:
    """The logs of the newest responses, by response id."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """Begin without logs.

        Args:
            max_bytes: most bytes of all complete logs together; the oldest are dropped.
        """
        self._max_bytes = max_bytes
        self._logs: OrderedDict[str, EventLog] = OrderedDict()

    def open(self, response_id: str) -> EventLog:
        """Begin and return the log of a response, which the current tenant owns."""
        log = self._logs[response_id] = EventLog(TENANT.get())
        return log

    def get(self, response_id: str) -> EventLog | None:
        """Return the log of a response; None if it is not kept."""
        return self._logs.get(response_id)

    def drop(self, response_id: str) -> None:
        """Drop the log of a response, if it is kept."""
        self._logs.pop(response_id, None)

    def make_room(self) -> None:
        """Drop complete logs until all complete ones together are within the limit.

        Each time, the oldest log of the tenant whose logs have the most bytes is dropped.
        """
        over: dict[str, deque[str]] = {}
        held: dict[str, int] = {}
        for key, log in self._logs.items():
            if log.is_over:
                over.setdefault(log.owner, deque()).append(key)
                held[log.owner] = held.get(log.owner, 0) + log.num_bytes
        while sum(held.values()) > self._max_bytes:
            heaviest = next_to_yield(held)
            dropped = self._logs.pop(over[heaviest].popleft())
            held[heaviest] -= dropped.num_bytes
