"""Requests that wait for a row or for pages, and the policies that order them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

from runtime.cache.manager import CacheManager
from runtime.config.registry import Registry
from runtime.scheduler.request import Request
from runtime.scheduler.step_clock import StepClock

# Ordering by cached prefix walks the tree for every waiting request, which does not pay off for
# queues longer than this.
LONGEST_PREFIX_QUEUE_LIMIT = 128

logger = logging.getLogger(__name__)

Policy = Callable[[list[Request], CacheManager], list[Request]]


def first_come_first_served(requests: list[Request], cache: CacheManager) -> list[Request]:
    """Keep the order of arrival."""
    del cache
    return requests


def longest_prefix_match(requests: list[Request], cache: CacheManager) -> list[Request]:
    """Put the longest cached prefix first; equal ones keep their order."""
    if len(requests) > LONGEST_PREFIX_QUEUE_LIMIT:
        return requests
    return sorted(requests, key=lambda r: -cache.match_length(r.keys(r.tokens)[:-1], r.namespace))


def highest_priority(requests: list[Request], cache: CacheManager) -> list[Request]:
    """Put the largest `priority` first; equal ones keep their order."""
    del cache
    return sorted(requests, key=lambda r: -r.priority)


POLICIES: Registry[Policy] = Registry(
    "schedule policy",
    {
        "fcfs": "runtime.scheduler.waiting:first_come_first_served",
        "lpm": "runtime.scheduler.waiting:longest_prefix_match",
        "priority": "runtime.scheduler.waiting:highest_priority",
    },
)


class WaitingQueue:
    """New requests after retracted ones; the policy orders only the new ones.

    Retracted requests were already admitted, so they go first, oldest first.

    Attributes:
        num_changes: how often a request was added or removed.
    """

    def __init__(self, policy: str, cache: CacheManager, clock: StepClock | None = None) -> None:
        """Create an empty queue.

        Args:
            policy: name of the scheduling policy that orders new requests.
            cache: finds cached prefixes, by which a policy may order.
            clock: measures how long requests wait, for each cause.
        """
        self._clock = clock or StepClock()
        self._policy = POLICIES.load(policy)
        self._is_fcfs = policy == "fcfs"
        # A policy that fails would fail in every step, so the failure is logged once.
        self._has_failed = False
        self._cache = cache
        self._retracted: list[Request] = []
        self._new: deque[Request] = deque()
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self._retracted) + len(self._new)

    def __iter__(self) -> Iterator[Request]:
        yield from self._retracted
        yield from self._new

    @property
    def num_retracted(self) -> int:
        """The number of requests that ran already and wait to be computed again."""
        return len(self._retracted)

    def is_full(self, max_queued: int | None) -> bool:
        """Whether `max_queued` requests wait; `None` for no bound."""
        return max_queued is not None and len(self) >= max_queued

    def push(self, request: Request) -> None:
        """Add a new request, or one that an earlier process had accepted."""
        if request.is_resumed:
            self.push_retracted(request)
            return
        self.num_changes += 1
        request.times.queued(self._clock)
        self._new.append(request)

    def push_retracted(self, request: Request) -> None:
        """Add a retracted request."""
        self.num_changes += 1
        request.times.queued(self._clock)
        self._retracted.append(request)
        self._retracted.sort(key=lambda r: r.arrival)

    def in_order(self) -> list[Request]:
        """Return all requests as the policy orders them now."""
        new = list(self._new)
        if not self._is_fcfs:
            try:
                new = self._policy(new, self._cache)
            except Exception:
                # It is unknown which request caused this, and all can be served in order of
                # arrival.
                if not self._has_failed:
                    logger.exception("The scheduling policy failed; the order of arrival holds")
                self._has_failed = True
        return self._retracted + new

    def remove(self, request: Request) -> None:
        """Remove a request, new or retracted."""
        self.num_changes += 1
        if request in self._retracted:
            self._retracted.remove(request)
        elif self._new and self._new[0] is request:
            self._new.popleft()
        else:
            self._new.remove(request)
