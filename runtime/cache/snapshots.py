"""Snapshots of recurrent states: which nodes of the prefix tree have one, and which goes first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.cache.radix_tree import RadixNode

# Of this many snapshots that were unused for the longest time, the one that saves the least goes.
NUM_COMPARED = 16


class Snapshots:
    """The nodes whose end has a snapshot, the latest used one last.

    `RadixNode.snapshot` is the slot, 0 for none. A snapshot that a running request still reads is
    pinned (`RadixNode.num_pins`).

    Attributes:
        freed: slots whose node has left the tree; the owner of the slots takes them.
        num_pinned: snapshots with at least one pin.
    """

    def __init__(self) -> None:
        """Start without snapshots."""
        self.freed: list[int] = []
        self.num_pinned = 0
        self._nodes: dict[RadixNode, None] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[RadixNode]:
        return iter(self._nodes)

    def put(self, node: RadixNode, slot: int) -> None:
        """Record that `slot` has the state at the end of `node`, which has no snapshot yet."""
        assert not node.snapshot, "a node has one snapshot"
        node.snapshot = slot
        self._nodes[node] = None

    def use(self, node: RadixNode) -> None:
        """Note that the snapshot of `node` is used now."""
        del self._nodes[node]
        self._nodes[node] = None

    def pin(self, node: RadixNode) -> None:
        """Keep the snapshot of `node`; each call needs one `unpin`."""
        self.num_pinned += not node.num_pins
        node.num_pins += 1

    def unpin(self, node: RadixNode) -> None:
        """Undo one `pin`."""
        assert node.num_pins > 0, "unpinned more often than pinned"
        node.num_pins -= 1
        self.num_pinned -= not node.num_pins

    def pin_only(self, nodes: list[RadixNode]) -> None:
        """Undo every `pin`, then pin each of `nodes` once."""
        for node in self._nodes:
            node.num_pins = 0
        self.num_pinned = 0
        for node in nodes:
            self.pin(node)

    def drop(self, node: RadixNode) -> None:
        """Free the snapshot of a node whose end leaves the tree, if it has one."""
        if node.snapshot:
            assert not node.num_pins, "the snapshot is still read"
            del self._nodes[node]
            self.freed.append(node.snapshot)
            node.snapshot = 0

    def evict(self) -> int | None:
        """Remove one snapshot that is not pinned and return its slot; `None` if there is none.

        Candidates are the snapshots that were unused for the longest time. The snapshot that saves
        the fewest tokens beyond its predecessor goes first, so a snapshot just behind another one
        goes early.
        """
        unpinned = (node for node in self._nodes if not node.num_pins)
        oldest = list(islice(unpinned, NUM_COMPARED))
        if not oldest:
            return None
        node = min(oldest, key=_tokens_saved)
        del self._nodes[node]
        slot, node.snapshot = node.snapshot, 0
        return slot


def _tokens_saved(node: RadixNode) -> int:
    """Return the number of tokens between a node's snapshot and the one before it."""
    num_tokens, step = len(node.tokens), node.parent
    while step is not None and not step.snapshot:
        num_tokens += len(step.tokens)
        step = step.parent
    return num_tokens
