"""Tracks the snapshots of recurrent states in the prefix tree, and chooses which to evict."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from runtime.cache.host_tier import HostTier
    from runtime.cache.radix_tree import RadixNode

# The snapshot to evict is chosen among this many that were unused for the longest time.
NUM_COMPARED = 16


class Snapshots:
    """The snapshots of recurrent states at the ends of tree nodes, ordered by their last use.

    A request with a cached prefix resumes from a snapshot. `RadixNode.snapshot` is the slot that
    has the states. A snapshot that a running request still reads is pinned and not evicted.

    Attributes:
        freed: slots of snapshots whose node was removed from the tree. `StatePool` collects them.
        num_pinned: number of pinned snapshots.
        host: gets the states of snapshots that are evicted; `None` if there is no host tier.
    """

    def __init__(self) -> None:
        """Start without snapshots."""
        self.freed: list[int] = []
        self.host: HostTier | None = None
        self.num_pinned = 0
        self._nodes: dict[RadixNode, None] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[RadixNode]:
        return iter(self._nodes)

    def put(self, node: RadixNode, slot: int) -> None:
        """Add a snapshot: `slot` has the states at the end of `node`, which has no snapshot yet."""
        assert not node.snapshot, "a node has one snapshot"
        node.snapshot = slot
        self._nodes[node] = None

    def use(self, node: RadixNode) -> None:
        """Note that the snapshot of `node` is used now."""
        del self._nodes[node]
        self._nodes[node] = None

    def pin(self, node: RadixNode) -> None:
        """Protect the snapshot of `node` from eviction; each call needs an `unpin`."""
        self.num_pinned += not node.num_pins
        node.num_pins += 1

    def unpin(self, node: RadixNode) -> None:
        """Undo one `pin` of the same node."""
        assert node.num_pins > 0, "unpinned more often than pinned"
        node.num_pins -= 1
        self.num_pinned -= not node.num_pins

    def pin_only(self, nodes: list[RadixNode]) -> None:
        """Undo all pins, then pin each of `nodes` once."""
        for node in self._nodes:
            node.num_pins = 0
        self.num_pinned = 0
        for node in nodes:
            self.pin(node)

    def drop(self, node: RadixNode) -> None:
        """Remove the snapshot of a node that is removed from the tree, if it has one."""
        if node.snapshot:
            assert not node.num_pins, "the snapshot is still read"
            del self._nodes[node]
            self.freed.append(node.snapshot)
            node.snapshot = 0

    def save(self, node: RadixNode) -> None:
        """Copy the states of a node's snapshot to host memory.

        Does nothing if the node has no snapshot or there is no host tier.
        """
        if self.host is not None and node.snapshot:
            self.host.save([node.last_key], np.array([node.snapshot], dtype=np.int32))

    def evict(self) -> int | None:
        """Remove a snapshot that is not pinned, and return its slot; `None` if there is none.

        Among the 16 least recently used ones, the snapshot is chosen that saves the fewest tokens:
        those between it and the previous snapshot on its path.
        """
        unpinned = (node for node in self._nodes if not node.num_pins)
        oldest = list(islice(unpinned, NUM_COMPARED))
        if not oldest:
            return None
        node = min(oldest, key=_tokens_saved)
        del self._nodes[node]
        self.save(node)
        slot, node.snapshot = node.snapshot, 0
        return slot


def _tokens_saved(node: RadixNode) -> int:
    """Return the number of tokens between a node's snapshot and the previous one on its path."""
    num_tokens, step = len(node.tokens), node.parent
    while step is not None and not step.snapshot:
        num_tokens += len(step.tokens)
        step = step.parent
    return num_tokens
