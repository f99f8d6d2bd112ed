"""Keeps new requests waiting, without an error, while weights change or generation is paused."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from runtime.client.request_history import Hold
from runtime.ipc.weight_messages import MemoryTag

logger = logging.getLogger(__name__)


@dataclass
class WeightState:
    """Which weights are loaded, and which memory is released.

    Attributes:
        version: label of the weights that are loaded now.
        restart_version: label of the weights that a restarted worker loads.
        released: tags of the memory that the workers have released; until it is brought back, no
            request can be served.
    """

    version: str = "default"
    restart_version: str = "default"
    released: frozenset[MemoryTag] = frozenset()

    @property
    def why_refused(self) -> str | None:
        """Why no request can be served now; `None` if requests can be served."""
        if not self.released:
            return None
        return (
            f"The engine's memory is released ({', '.join(sorted(self.released))}); "
            "/resume_memory_occupation brings it back."
        )

    def restarted(self) -> None:
        """Record that a worker was restarted, with all its memory and the weights of its files."""
        self.released = frozenset()
        if self.version != self.restart_version:
            logger.error(
                "The weights of version %r were lost with their worker; it loads version %r.",
                self.version,
                self.restart_version,
            )
            self.version = self.restart_version


# The reasons for keeping requests back.
PAUSE, SESSION, UPDATE = "pause", "session", "update"


class RequestGate:
    """Holds requests that are admitted but not sent yet, in order of arrival.

    The gate is closed as long as it has at least one reason.
    """

    def __init__(self) -> None:
        """Start open."""
        # Whether the reason `UPDATE` is an update from files.
        self._reads_disk = False
        # The time at which each reason was given, by `time.monotonic()`.
        self._reasons: dict[str, float] = {}
        self._held: dict[int, Callable[[], None]] = {}

    @property
    def reasons(self) -> frozenset[str]:
        """Why the gate is closed; empty if it is open."""
        return frozenset(self._reasons)

    @property
    def reason(self) -> Hold:
        """The first reason why the gate is closed, in the order update, session, pause.

        An update counts as `disk` if it reads files.
        """
        if UPDATE in self._reasons:
            return "disk" if self._reads_disk else "update"
        return "session" if SESSION in self._reasons else "pause"

    def closed_for_s(self, reason: str) -> float:
        """Return the seconds since `reason` closed the gate; 0 if it does not close it now."""
        since = self._reasons.get(reason)
        return 0.0 if since is None else time.monotonic() - since

    @property
    def is_closed(self) -> bool:
        """Whether requests are held back."""
        return bool(self._reasons)

    @property
    def num_held(self) -> int:
        """Number of requests that wait here."""
        return len(self._held)

    def held(self) -> set[int]:
        """Return the ids of the requests that wait here."""
        return set(self._held)

    def hold(self, request_id: int, send: Callable[[], None]) -> None:
        """Keep a request and call `send` when the gate opens; the gate must be closed."""
        self._held[request_id] = send

    def drop(self, request_id: int) -> bool:
        """Forget a request; return whether it waited here."""
        return self._held.pop(request_id, None) is not None

    def close(self, reason: str, *, reads_disk: bool = False) -> None:
        """Hold new requests back because of `reason`, until `open` withdraws it.

        Args:
            reason: why requests must wait.
            reads_disk: whether an update reads files, so that `Hold` is `disk` and not `update`.
        """
        self._reads_disk = self._reads_disk or reads_disk
        self._reasons.setdefault(reason, time.monotonic())

    def open(self, reason: str) -> None:
        """Withdraw a reason; if none is left, send all waiting requests in order."""
        self._reasons.pop(reason, None)
        self._reads_disk = self._reads_disk and UPDATE in self._reasons
        while self._held and not self._reasons:
            request_id = next(iter(self._held))
            self._held.pop(request_id)()
