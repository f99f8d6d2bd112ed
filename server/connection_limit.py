"""How many connections are served, so that descriptors are left for probes and for ourselves."""

from __future__ import annotations

import resource
from collections import OrderedDict
from typing import Protocol

# The soft limit of a shell is often 1,024, the hard one what the machine can do.
_MAX_DESCRIPTORS = 65_536
# For files, pipes and sockets to the children, and the connections over the limit.
_RESERVED = 256
# Connections over the limit, on which probes are answered.
NUM_SPARE = 64


class Connection(Protocol):
    """A connection that may have to go."""

    def cut_off(self) -> None:
        """End it at once."""


class ConnectionLimit:
    """Tells connections that are served from those on which only probes are.

    Of the latter there are few. The oldest one makes way for a newcomer, so that whoever holds them
    all open keeps no probe out.
    """

    def __init__(self, most: int) -> None:
        """Serve `most` connections at a time."""
        self.most = most
        self._spare: OrderedDict[Connection, None] = OrderedDict()

    def add(self, connection: Connection, num_open: int) -> bool:
        """Whether `connection`, one of `num_open`, is over the limit."""
        if num_open <= self.most:
            return False
        self._spare[connection] = None
        if len(self._spare) > NUM_SPARE:
            oldest, _ = self._spare.popitem(last=False)
            oldest.cut_off()
        return True

    def discard(self, connection: Connection) -> None:
        """`connection` has ended."""
        self._spare.pop(connection, None)


def raise_descriptor_limit() -> int:
    """Let this process and its children open as many files as they may; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_DESCRIPTORS
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def connections_within(num_descriptors: int) -> int:
    """Connections that `num_descriptors` allow."""
    return max(1, num_descriptors - min(_RESERVED, num_descriptors // 2) - NUM_SPARE)
