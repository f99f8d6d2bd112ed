"""The queue of requests that wait to run, and the policies that order it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

from runtime.cache.manager import CacheManager
from runtime.config.registry import Registry
from runtime.scheduler.request import Request
from runtime.scheduler.step_clock import StepClock

# The policy that orders by cached prefix looks up every waiting request in the prefix tree. It
# keeps the order of arrival in queues longer than this, because the look-ups would cost too much.
LONGEST_PREFIX_QUEUE_LIMIT = 128

logger = logging.getLogger(__name__)

Policy = Callable[[list[Request], CacheManager], list[Request]]


def first_come_first_served(requests: list[Request], cache: CacheManager) -> list[Request]:
    """Return the requests in their order of arrival."""
    del cache
    return requests


def longest_prefix_match(requests: list[Request], cache: CacheManager) -> list[Request]:
    """Return the requests ordered by the length of their cached prefix, the longest first.

    Requests with equal length keep their order. A queue longer than `LONGEST_PREFIX_QUEUE_LIMIT`
    is returned as it is.
    """
    if len(requests) > LONGEST_PREFIX_QUEUE_LIMIT:
        return requests
    return sorted(requests, key=lambda r: -cache.match_length(r.keys(r.tokens)[:-1], r.namespace))


def highest_priority(requests: list[Request], cache: CacheManager) -> list[Request]:
    """Return the requests ordered by `priority`, the largest first; equal ones keep their order."""
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
    """Requests that wait to run: retracted requests first, then new ones.

    A retracted request was running and lost its pages. Retracted requests are ordered by arrival.
    The policy orders only the new requests.

    Attributes:
        num_changes: how often a request was added or removed.
    """

    def __init__(self, policy: str, cache: CacheManager, clock: StepClock | None = None) -> None:
        """Create an empty queue.

        Args:
            policy: name of the scheduling policy that orders new requests.
            cache: the KV cache, in which a policy may look up cached prefixes.
            clock: measures how long requests wait for each cause.
        """
        self._clock = clock or StepClock()
        self._policy = POLICIES.load(policy)
        self._is_fcfs = policy == "fcfs"
        # Whether the policy has failed. It would fail again in every step, so only the first
        # failure is logged.
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
        """The number of requests that were running before and wait to be computed again."""
        return len(self._retracted)

    def is_full(self, max_queued: int | None) -> bool:
        """Whether at least `max_queued` requests wait; `None` stands for no limit."""
        return max_queued is not None and len(self) >= max_queued

    def push(self, request: Request) -> None:
        """Add a request that is new to this process.

        If an earlier process had already accepted the request, it goes before the new ones.
        """
        if request.is_resumed:
            self.push_retracted(request)
            return
        self.num_changes += 1
        request.times.queued(self._clock)
        self._new.append(request)

    def push_retracted(self, request: Request) -> None:
        """Add a request that was running and was put back into the queue."""
        self.num_changes += 1
        request.times.queued(self._clock)
        self._retracted.append(request)
        self._retracted.sort(key=lambda r: r.arrival)

    def in_order(self) -> list[Request]:
        """Return all waiting requests in the order in which they are to run."""
        new = list(self._new)
        if not self._is_fcfs:
            try:
                new = self._policy(new, self._cache)
            except Exception:
                # The request that caused the failure is unknown. All requests can still be served
                # in order of arrival.
                if not self._has_failed:
                    logger.exception("The scheduling policy failed; the order of arrival holds")
                self._has_failed = True
        return self._retracted + new

    def remove(self, request: Request) -> None:
        """Remove a new or retracted request from the queue."""
        self.num_changes += 1
        if request in self._retracted:
            self._retracted.remove(request)
        elif self._new and self._new[0] is request:
            self._new.popleft()
        else:
            self._new.remove(request)
