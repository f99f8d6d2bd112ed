"""Limits the number of connections, and reserves file descriptors for probes and the server."""

from __future__ import annotations

import resource
from collections import OrderedDict
from typing import Protocol

# The most file descriptors to ask for. The soft limit is often only 1,024, and the hard limit may
# be much higher than needed.
_MAX_DESCRIPTORS = 65_536
# Descriptors for files, pipes and the sockets between the processes.
_RESERVED = 256
# Number of connections over the limit that stay open, so that probes are answered on them.
NUM_SPARE = 64


class Connection(Protocol):
    """A connection that can be aborted."""

    def cut_off(self) -> None:
        """Abort the connection immediately."""


class ConnectionLimit:
    """Separates connections within the limit from spare ones, on which only probes are answered.

    The number of spare connections is fixed. A new spare connection replaces the oldest one. So a
    client cannot keep probes out by occupying all of them.
    """

    def __init__(self, most: int) -> None:
        """Allow `most` connections besides the spare ones."""
        self.most = most
        self._spare: OrderedDict[Connection, None] = OrderedDict()

    def add(self, connection: Connection, num_open: int) -> bool:
        """Register a connection; return whether it is over the limit and thus a spare one.

        Args:
            connection: the new connection.
            num_open: number of open connections, including this one.
        """
        if num_open <= self.most:
            return False
        self._spare[connection] = None
        if len(self._spare) > NUM_SPARE:
            oldest, _ = self._spare.popitem(last=False)
            oldest.cut_off()
        return True

    def discard(self, connection: Connection) -> None:
        """Remove a connection that has ended."""
        self._spare.pop(connection, None)


def raise_descriptor_limit() -> int:
    """Raise this process's limit of file descriptors, which children inherit; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_DESCRIPTORS
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def connections_within(num_descriptors: int) -> int:
    """Return how many connections `num_descriptors` descriptors allow, without the spare ones."""
    return max(1, num_descriptors - min(_RESERVED, num_descriptors // 2) - NUM_SPARE)
