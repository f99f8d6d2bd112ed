"""The limit on connections, which reserves descriptors for probes and for the server itself."""

from __future__ import annotations

import resource
from collections import OrderedDict
from typing import Protocol

# A shell's soft limit is often 1,024; the hard limit is the machine's.
_MAX_DESCRIPTORS = 65_536
# For files, pipes, sockets to the children, and the connections over the limit.
_RESERVED = 256
# Connections over the limit, on which probes are answered.
NUM_SPARE = 64


class Connection(Protocol):
    """A connection that may be cut off."""

    def cut_off(self) -> None:
        """Abort the connection immediately."""


class ConnectionLimit:
    """Separates normal connections from spare ones. Only probes are answered on spare connections.

    Spare connections are few. A new spare connection replaces the oldest, so a client cannot keep
    probes out by holding all of them.
    """

    def __init__(self, most: int) -> None:
        """Serve `most` connections at a time."""
        self.most = most
        self._spare: OrderedDict[Connection, None] = OrderedDict()

    def add(self, connection: Connection, num_open: int) -> bool:
        """Return whether `connection` exceeds the limit, where `num_open` connections are open.

        If it does, it becomes a spare connection.
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
    """Raise the descriptor limit of this process and its children; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_DESCRIPTORS
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def connections_within(num_descriptors: int) -> int:
    """The number of connections that `num_descriptors` allow."""
    return max(1, num_descriptors - min(_RESERVED, num_descriptors // 2) - NUM_SPARE)
