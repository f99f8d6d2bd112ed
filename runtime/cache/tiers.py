"""The tiers of the prefix cache below the device: host memory and files."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.cache.block_table import BlockTable
from runtime.cache.file_tier import Fetch
from runtime.cache.host_states import HostStates
from runtime.cache.host_tier import HostTier, root_key
from runtime.cache.radix_tree import RadixTree, Tokens


class Tiers:
    """Finds pages and states of requests in host memory and files, and has them copied back.

    Attributes:
        pages: pages in host memory; `None` if there is only the device.
        states: recurrent states in host memory; `None` if there are none.
    """

    def __init__(self, tree: RadixTree, pages: HostTier | None, states: HostStates | None) -> None:
        """Combine the tiers, for the prefix tree `tree`."""
        self.pages = pages
        self.states = states
        self._tree = tree

    def _all(self) -> Iterator[HostTier]:
        if self.pages is not None:
            yield self.pages
        if self.states is not None:
            yield self.states.slots

    # ---- finding and loading ----

    def count_pages(self, tokens: Tokens, namespace: str, num_pages: int) -> int:
        """Return the number of pages of the longest prefix on the device and in host memory.

        The first `num_pages` pages are on the device, and the model has no recurrent states.
        """
        if self.pages is None:
            return num_pages
        keys = list(self.pages.keys(tokens, root_key(namespace)))
        return num_pages + len(self.pages.find(keys[num_pages:]))

    def last_place(self, tokens: Tokens, namespace: str, num_pages: int) -> int:
        """Return up to which page a request can resume from recurrent states in host memory.

        Returns a number of pages, 0 for none. `HostStates.last_place` describes the arguments.
        """
        return 0 if self.states is None else self.states.last_place(tokens, namespace, num_pages)

    def find(self, block_table: BlockTable, prefix: Tokens, *, is_recurrent: bool) -> list[bytes]:
        """Return the keys of the pages that are copied back for a request, after its shared pages.

        Args:
            block_table: the request's block table with its shared pages.
            prefix: keys of the tokens that may come from the cache, and one more.
            is_recurrent: whether the model has recurrent states. Then pages are copied back only up
                to `BlockTable.resume_pages`.
        """
        if self.pages is None or block_table.node is None:
            return []
        size = self.pages.page_size
        end = block_table.resume_pages * size if is_recurrent else len(prefix) - 1
        rest = prefix[block_table.num_shared * size : max(end, 0)]
        keys = self.pages.find(self.pages.keys(rest, block_table.node.last_key))
        self.pages.touch(keys)
        return keys

    def load(self, block_table: BlockTable, keys: list[bytes]) -> int | None:
        """Start copying back pages, and the recurrent states after them, for a request.

        Args:
            block_table: has the shared pages, and pages of its own for what comes back.
            keys: what `find` returned.

        Returns:
            Number of pages that come back. `None` if the request was to resume from states, and not
            everything comes back.
        """
        if block_table.resume_pages and self.states is not None:
            return len(keys) if self.states.load(block_table, keys) else None
        return 0 if self.pages is None or not keys else self.pages.load(block_table, keys)

    def is_loading(self, block_table: BlockTable) -> bool:
        """Whether a step with the request would have to wait for copies from host memory."""
        states = self.states
        if states is not None and block_table.state_ticket > states.slots.last_done():
            return True
        return self.pages is not None and self.pages.is_loading(block_table)

    def use(self, block_table: BlockTable) -> None:
        """Let the next step wait for a request's copies from host memory; see `HostTier.use`."""
        if self.pages is not None:
            self.pages.use(block_table)
        if self.states is not None:
            self.states.slots.need(block_table.state_ticket)
            block_table.state_ticket = 0

    # ---- files ----

    def fetch(self, prefix: Tokens, namespace: str) -> Fetch | None:
        """Start reading pages of a waiting request's prompt from files into host memory.

        `prefix` has the keys of the tokens that may come from the cache, and the key of one more
        token. Returns what the request waits for; `None` if there is nothing to wait for.
        """
        if self.pages is None or self.pages.files is None:
            return None
        known = prefix[: max(len(prefix) - 1, 0)]
        num_pages = self._tree.count_pages(known, namespace)
        return self.pages.fetch(list(self.pages.keys(known, root_key(namespace)))[num_pages:])

    def is_waiting(self, fetch: Fetch | None) -> bool:
        """Whether a request should still wait for pages that are being read from files."""
        return self.pages is not None and self.pages.is_waiting(fetch)

    @property
    def is_reading(self) -> bool:
        """Whether pages are being read from files."""
        return self.pages is not None and self.pages.is_reading_files

    def move_files(self) -> None:
        """Continue the copies between host memory and files, if there are files."""
        if self.pages is not None:
            self.pages.move_files()

    def stop_files(self) -> None:
        """Use no files from now on, because the weights change."""
        if self.pages is not None:
            self.pages.stop_files()

    # ---- all of it ----

    def clear(self) -> None:
        """Drop everything in host memory; see `HostTier.clear`."""
        for tier in self._all():
            tier.clear()

    def recover(self) -> None:
        """Drop everything in host memory after an exception; the next step waits for all copies."""
        for tier in self._all():
            tier.recover()

    def check_invariants(self) -> None:
        """Assert that each host page and slot is in exactly one place.

        Raises:
            AssertionError: one of them is lost or used twice.
        """
        for tier in self._all():
            tier.check_invariants()
