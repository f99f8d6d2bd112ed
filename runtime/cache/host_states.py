"""Recurrent states in host memory: evicted snapshots, from which requests can resume.

The key of a snapshot is the key of the last page before it. A request resumes at the last position
for which a snapshot and all pages up to it exist. Each of them may be on the device or in host
memory.
"""

from __future__ import annotations

from runtime.cache.block_table import BlockTable
from runtime.cache.host_tier import HostTier, root_key
from runtime.cache.radix_tree import RadixNode, Tokens
from runtime.cache.state_pool import StatePool


class HostStates:
    """Finds the positions at which requests can resume with states from host memory.

    Also starts the copies of these states to the device.

    Attributes:
        slots: a `HostTier` for snapshots, in which each page is a slot of states.
    """

    def __init__(self, num_slots: int, page_size: int, pages: HostTier, states: StatePool) -> None:
        """Manage `num_slots` slots in host memory, beside the pages in `pages`."""
        self.slots = HostTier(num_slots, page_size)
        self._pages = pages
        self._states = states

    def last_place(self, tokens: Tokens, namespace: str, num_pages: int) -> int:
        """Return the last position whose states, and pages not on the device, are in host memory.

        Args:
            tokens: the prefix cache's keys of the tokens that may come from the cache.
            namespace: the sequence's namespace.
            num_pages: number of its first pages that are on the device.

        Returns:
            Number of pages before this position; 0 for none.
        """
        keys = list(self._pages.keys(tokens, root_key(namespace)))
        rest = self._pages.find(keys[num_pages:])
        for place in range(num_pages + len(rest), 0, -1):
            if keys[place - 1] in self.slots:
                self.slots.touch([keys[place - 1]])
                return place
        return 0

    def load(self, block_table: BlockTable, keys: list[bytes]) -> bool:
        """Start copying back the pages and the states from which a request resumes.

        Args:
            block_table: has pages for all of the prompt; those behind the shared ones are filled.
            keys: keys of the pages that come back, up to `block_table.resume_pages`.

        Returns:
            Whether all of them come back. False if some were evicted from host memory meanwhile.
        """
        end, node = block_table.resume_pages, block_table.node
        assert node is not None, "its cached prefix ends there"
        slot = self._states.resume(block_table.state_hold, end * self.slots.page_size)
        if block_table.num_shared + len(self._pages.find(keys)) < end:
            return False
        block_table.state_ticket = self.slots.load_one(keys[-1] if keys else node.last_key, slot)
        if not block_table.state_ticket:
            return False
        self._pages.load(block_table, keys)
        return True

    def distrust(self, node: RadixNode | None) -> None:
        """Drop the host copies of a node's path in the prefix tree, because they may be wrong."""
        while node is not None:
            self.slots.forget(node.keys)
            self._pages.forget(node.keys)
            node = node.parent
