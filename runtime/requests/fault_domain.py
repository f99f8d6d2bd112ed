"""Each request is a fault domain: what raises while one is handled ends that one, no other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

R = TypeVar("R")

logger = logging.getLogger(__name__)


class FaultDomains(Generic[R]):
    """Ends the request that was being handled when something raised; its caller goes on.

    In a loop that runs once for every token, `try` with `failed` is the same without the cost of
    `with`.

    Attributes:
        num_faults: requests ended so far.
    """

    def __init__(self, end: Callable[[R], None]) -> None:
        """Let `end` end a request, in whatever state it was left; that must not raise for it."""
        self._end = end
        self.num_faults = 0

    def of(self, request: R) -> _FaultDomain[R]:
        """A context in which `request` is handled; leaves nothing to be raised but its own end."""
        return _FaultDomain(self, request)

    def failed(self, request: R, error: Exception) -> None:
        """End `request`, whose handling raised `error`."""
        self.num_faults += 1
        logger.error("Request %s failed; it ends", request, exc_info=error)
        self._end(request)


class _FaultDomain(Generic[R]):
    __slots__ = ("_domains", "_request")

    def __init__(self, domains: FaultDomains[R], request: R) -> None:
        self._domains = domains
        self._request = request

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            # None, or what ends the process: `DeviceLost`, `KeyboardInterrupt`.
            return False
        self._domains.failed(self._request, error)
        return True
