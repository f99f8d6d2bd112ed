"""Manages the pages of the KV cache; the only writer of the page pool and of the prefix tree.

Every page is in exactly one place: free in the pool, cached in the tree, or owned by one request.
The first pages of a request's block table may be pages of the tree, which the request shares and
locks:

    block_table.pages:  [ shared with the tree (locked by block_table.node) | owned by the request ]
                          0 ...................................... num_shared ........ num_pages

If every layer has a sliding window, pages that the window has moved past may be freed. The request
then stops sharing pages with the tree:

    block_table.pages:  [ 0, 0, ... 0 | owned by the request ]
                          num_dropped .......... num_pages
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from runtime.cache.block_table import BlockTable
from runtime.cache.host_states import HostStates
from runtime.cache.host_tier import HostTier
from runtime.cache.page_pool import EMPTY_PAGES, PagePool, Pages
from runtime.cache.radix_tree import CommonPrefix, PrefixMatch, RadixNode, RadixTree, Tokens
from runtime.cache.state_pool import StatePool
from runtime.cache.tiers import Tiers
from runtime.cache.window_pages import WindowPages
from runtime.ipc.time_messages import PrefixBreak


class CacheManager:
    """Finds cached prefixes, allocates, shares and frees pages, and evicts cached pages if needed.

    Attributes:
        window: most keys that a query attends to, with its own; `None` if a layer has no window.
        num_evicted_tokens: number of tokens evicted from the prefix cache so far.
        states: slots of recurrent states; `None` if the model has none.
        windows: pages of sliding-window layers; `None` unless these have pages of their own.
        host: the pages in host memory; `None` if there are none.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        enable_prefix_cache: bool = True,
        window: int | None = None,
        num_state_slots: int = 0,
        max_running: int = 0,
        num_host_pages: int = 0,
        num_host_slots: int = 0,
    ) -> None:
        """Manage `num_pages` pages of `page_size` tokens each.

        Args:
            num_pages: number of pages, all free at first.
            page_size: number of tokens per page.
            enable_prefix_cache: whether computed prefixes are kept for later requests.
            window: see the attribute.
            num_state_slots: number of slots of recurrent states; 0 if the model has none.
            max_running: most requests that have recurrent states at the same time.
            num_host_pages: number of pages in host memory, to which evicted pages move.
            num_host_slots: number of slots in host memory for evicted snapshots of states.
        """
        self.page_size = page_size
        self.window = window
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_size)
        self.enable_prefix_cache = enable_prefix_cache
        self.num_evicted_tokens = 0
        self.windows: WindowPages | None = None
        self.host = HostTier(num_host_pages, page_size) if num_host_pages else None
        self.tree.host = self.host
        self.states: StatePool | None = None
        if num_state_slots:
            self.states = StatePool(num_state_slots, page_size, max_running, self.tree)
        host_states: HostStates | None = None
        if self.host is not None and self.states is not None and num_host_slots:
            host_states = HostStates(num_host_slots, page_size, self.host, self.states)
            self.tree.snapshots.host = host_states.slots
        self.tiers = Tiers(self.tree, self.host, host_states)

    @property
    def lacks_states(self) -> bool:
        """Whether there are too few slots of recurrent states for another request."""
        return self.states is not None and not self.states.admits

    @property
    def num_available_pages(self) -> int:
        """Number of pages that are free or can be evicted."""
        return self.pool.num_free + self.tree.num_pages - self.tree.num_locked_pages

    @property
    def num_held_pages(self) -> int:
        """Number of pages that running requests own or share with the prefix tree."""
        return self.pool.num_pages - self.num_available_pages

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that `num_tokens` tokens need; the last may be partly used."""
        return -(-num_tokens // self.page_size)

    def match_length(self, tokens: Tokens, namespace: str) -> int:
        """Return the number of tokens of the longest cached prefix from which a request can resume.

        Nothing changes in the cache.
        """
        if not self.enable_prefix_cache:
            return 0
        if self.states is not None:
            return self.tree.count_resumable(tokens, namespace) * self.page_size
        if self.windows is not None:
            pages = self.tree.find(tokens, namespace)
            return self.windows.count_resumable(pages) * self.page_size
        return self.tree.count_pages(tokens, namespace) * self.page_size

    def count_found(self, tokens: Tokens, namespace: str) -> int:
        """Return the length of the longest cached prefix, including pages in host memory."""
        length = self.match_length(tokens, namespace)
        if self.states is None:
            found = self.tiers.count_pages(tokens, namespace, length // self.page_size)
        else:
            num_pages = self.tree.count_pages(tokens, namespace)
            found = self.tiers.last_place(tokens, namespace, num_pages)
        return max(length, found * self.page_size)

    def common_prefix(self, tokens: Tokens, namespace: str) -> CommonPrefix:
        """Return the common beginning of `tokens` and the most similar cached sequence."""
        return self.tree.common_prefix(tokens, namespace)

    def prefix_break(
        self, block_table: BlockTable, tokens: Tokens
    ) -> tuple[PrefixBreak | None, bool]:
        """Return where a prompt differs from all cached prompts; call it right after `allocate`.

        Args:
            block_table: the request's block table.
            tokens: the prefix cache's keys of the whole prompt.

        Returns:
            The first position that no cached prompt shares; `None` if the whole prompt is cached,
            or if there is no prefix cache. And whether the request's namespace is empty.
        """
        node = block_table.node
        if node is None:
            return None, False
        num_cached = block_table.num_shared * self.page_size
        common = self.tree.common_after(node, tokens[num_cached:])
        num_loaded = block_table.num_loaded * self.page_size
        if common.num_tokens < num_loaded:
            # The pages after those in host memory were not compared.
            common = CommonPrefix(num_loaded, differs=False)
        is_empty = node.parent is None and not node.children and not num_loaded
        index = num_cached + common.num_tokens
        return (PrefixBreak(index, common.differs) if index < len(tokens) else None), is_empty

    def attach_prefix(self, block_table: BlockTable, tokens: Tokens, namespace: str) -> int:
        """Give an empty block table the pages of the longest cached prefix, and lock them.

        At least the last of `tokens` is not taken from the cache, because its logits are needed.

        Returns:
            Number of tokens in the prefix.
        """
        assert block_table.num_pages == 0
        if not self.enable_prefix_cache:
            self._begin_states(block_table, None)
            return 0
        match = self.tree.match(tokens[: len(tokens) - 1], namespace)
        node, num_pages = match.node, len(match.pages)
        if self.states is not None:
            while node.parent is not None and not node.snapshot:
                num_pages -= len(node.pages)
                node = node.parent
            known = tokens[: len(tokens) - 1]
            place = self.tiers.last_place(known, namespace, len(match.pages))
            if place > num_pages:
                block_table.resume_pages, num_pages = place, min(place, len(match.pages))
                node = self.tree.match(known[: num_pages * self.page_size], namespace).node
            if num_pages < len(match.pages):
                # Further requests may share the pages that follow; a snapshot lets them resume.
                block_table.branch_points.add(len(match.pages) * self.page_size)
        elif self.windows is not None:
            num_pages = self.windows.count_resumable(match.pages)
            if num_pages < len(match.pages):
                block_table.branch_points.add(len(match.pages) * self.page_size)
                node = self.tree.match(tokens[: num_pages * self.page_size], namespace).node
        block_table.append(match.pages[:num_pages])
        block_table.num_shared = num_pages
        block_table.node = node
        block_table.version += 1
        self.tree.lock(node)
        self._begin_states(block_table, node)
        return num_pages * self.page_size

    def _begin_states(self, block_table: BlockTable, node: RadixNode | None) -> None:
        if self.states is not None:
            num_tokens = block_table.num_shared * self.page_size
            if block_table.resume_pages:
                # The request resumes from a snapshot in host memory, not from the node's.
                node = None
            block_table.state_hold = self.states.begin(node, num_tokens)

    def snapshot_points(
        self, block_table: BlockTable, start: int, length: int, num_known: int
    ) -> Sequence[int]:
        """Return where a prompt chunk saves snapshots of recurrent states, as token counts.

        Snapshots are saved only at ends of pages: where sequences with the same beginning diverge,
        at the last page end in the prompt, and at the last page end in the chunk.

        Args:
            block_table: block table of the request.
            start: number of tokens before the chunk.
            length: number of tokens in the chunk.
            num_known: number of known tokens of the request.
        """
        if not self.enable_prefix_cache:
            return ()
        end = start + length
        # An equal prompt computes its last token again, so it resumes before this token.
        last = end if end < num_known else num_known - 1
        wanted = {*block_table.branch_points, last - last % self.page_size}
        return sorted(point for point in wanted if start < point <= end)

    def allocate(
        self,
        block_table: BlockTable,
        prefix: Tokens,
        namespace: str,
        num_tokens: int,
        *,
        num_reserved: int,
        free_more: Callable[[], object],
    ) -> int | None:
        """Give a new request the longest cached prefix, and pages for all of its tokens.

        Args:
            block_table: the request's block table, which is empty.
            prefix: keys of the tokens that may come from the cache.
            namespace: prefixes are shared only within a namespace.
            num_tokens: number of tokens that need pages.
            num_reserved: number of pages that must stay available for running requests.
            free_more: called once if there are too few pages; it may free some.

        Returns:
            Number of tokens from the cache; `None`, with nothing changed, if pages are missing.
        """
        if self.lacks_states or (self.windows is not None and not self.windows.admits):
            return None
        num_cached = self.attach_prefix(block_table, prefix, namespace)
        # The first generated token needs room too.
        needed = self.pages_for(num_tokens + 1) - block_table.num_pages + num_reserved
        if needed > self.num_available_pages:
            free_more()
        if needed > self.num_available_pages and num_reserved:
            self.release(block_table, prefix[:0], namespace)
            return None
        keys = self.tiers.find(block_table, prefix, is_recurrent=self.states is not None)
        extended = self.extend(block_table, num_tokens)
        assert extended, "pages were counted before"
        if self.windows is not None:
            self.windows.begin(block_table, num_tokens)
        num_loaded = self.tiers.load(block_table, keys)
        if num_loaded is None:
            self.release(block_table, prefix[:0], namespace)
            return None
        return num_cached + num_loaded * self.page_size

    def extend(self, block_table: BlockTable, num_tokens: int) -> bool:
        """Extend a block table to `num_tokens` tokens; if pages are missing, return false."""
        missing = self.pages_for(num_tokens) - block_table.num_pages
        if missing <= 0:
            return True
        if not self._make_free(missing):
            return False
        block_table.append(self.pool.take(missing))
        return True

    def extend_each(self, block_tables: list[BlockTable]) -> Pages | None:
        """Append one page to each of `block_tables`.

        Returns:
            `[num_block_tables]` int32, the new pages; `None`, with nothing changed, if some are
            missing.
        """
        if not self._make_free(len(block_tables)):
            return None
        pages = self.pool.take(len(block_tables))
        for block_table, page in zip(block_tables, pages.tolist(), strict=True):
            block_table.append_one(page)
        return pages

    def _make_free(self, count: int) -> bool:
        """Evict cached pages until `count` pages are free; return false if that is impossible."""
        if count > self.num_available_pages:
            return False
        shortage = count - self.pool.num_free
        if shortage > 0:
            evicted = self.tree.evict(shortage, to_host=True)
            self.num_evicted_tokens += len(evicted) * self.page_size
            self._free(evicted)
        return True

    def _free(self, pages: Pages) -> None:
        """Free pages, and the pages of sliding-window layers that belong to them."""
        if self.windows is not None:
            self.windows.drop(pages)
        self.pool.give_back(pages)

    def share(self, block_table: BlockTable, tokens: Tokens, namespace: str) -> None:
        """Put the full pages of `tokens` into the prefix cache; the running request shares them."""
        if not self.enable_prefix_cache or block_table.num_dropped:
            return
        num_full = len(tokens) // self.page_size
        if num_full > block_table.num_shared:
            self._share_pages(block_table, tokens, num_full, namespace)
        if self.states is not None:
            self.states.share(block_table.state_hold, tokens, namespace)

    def _share_pages(
        self, block_table: BlockTable, tokens: Tokens, num_full: int, namespace: str
    ) -> None:
        match = self._insert(block_table, tokens, num_full, namespace)
        self.tree.lock(match.node)
        if block_table.node is not None:
            self.tree.unlock(block_table.node)
        block_table.num_shared = num_full
        block_table.node = match.node
        block_table.version += 1

    def drop_behind(self, block_table: BlockTable, first_seen: int) -> int:
        """Free the pages that lie wholly before token `first_seen`, which no later query reads.

        Pages that are shared with the prefix tree are released together, once all of them lie
        before that token. They stay in the tree as cached pages.

        Returns:
            Number of pages that must lie before `first_seen` until another call can free more.
        """
        num_behind = min(max(first_seen, 0) // self.page_size, block_table.num_pages)
        if num_behind < block_table.num_shared:
            return block_table.num_shared
        if block_table.node is not None:
            self.tree.unlock(block_table.node)
        first = max(block_table.num_shared, block_table.num_dropped)
        if num_behind > first:
            self.pool.give_back(block_table.pages[first:num_behind])
        block_table.pages[:num_behind] = 0
        block_table.num_dropped = max(num_behind, first)
        block_table.num_shared, block_table.node = 0, None
        return block_table.num_dropped + 1

    def release(self, block_table: BlockTable, tokens: Tokens, namespace: str) -> None:
        """Free the pages of a block table.

        The full pages of `tokens` stay in the prefix cache; all of these tokens are computed.
        """
        num_kept = block_table.num_shared
        if self.enable_prefix_cache and len(tokens) and not block_table.num_dropped:
            num_full = min(len(tokens) // self.page_size, block_table.num_pages)
            if num_full > block_table.num_shared:
                self._insert(block_table, tokens, num_full, namespace)
                num_kept = num_full
            if self.states is not None:
                shared = tokens[: num_full * self.page_size]
                self.states.share(block_table.state_hold, shared, namespace, is_over=True)
        if self.states is not None and block_table.state_hold >= 0:
            self.states.end(block_table.state_hold)
            block_table.state_hold = -1
        block_table.branch_points.clear()
        if self.windows is not None:
            self.windows.end(block_table)
        self.tiers.use(block_table)
        block_table.num_loaded = block_table.resume_pages = 0
        self._free(block_table.held()[max(num_kept, block_table.num_dropped) :])
        if block_table.node is not None:
            self.tree.unlock(block_table.node)
        block_table.pages, block_table.node = EMPTY_PAGES, None
        block_table.num_pages = block_table.num_shared = block_table.num_dropped = 0
        block_table.version += 1

    def distrust(self, block_table: BlockTable, namespace: str) -> None:
        """Free the pages of a block table whose keys and values may be wrong.

        In a model with recurrent states, the earlier chunks of a prompt enter the prefix cache
        before the last chunk is checked. So this also removes the snapshots on the prompt's path in
        the tree, and the pages of the path that nothing else uses.
        """
        node = block_table.node
        if self.tiers.states is not None:
            self.tiers.states.distrust(node)
        self.release(block_table, np.empty(0, dtype=np.int32), namespace)
        if node is not None and self.states is not None:
            self.pool.give_back(self.tree.discard(node))
            self.states.collect()

    def _insert(
        self, block_table: BlockTable, tokens: Tokens, num_full: int, namespace: str
    ) -> PrefixMatch:
        known = tokens[: num_full * self.page_size]
        match = self.tree.insert(known, block_table.held()[:num_full], namespace)
        # If another request has put the same prefix into the tree before, the tree's pages stay,
        # and this request's pages are freed.
        ours = block_table.held()[block_table.num_shared : num_full]
        theirs = match.pages[block_table.num_shared :]
        is_double = ours != theirs
        double = ours[is_double]
        if self.windows is not None:
            self.windows.replace(double, theirs[is_double])
        block_table.pages[:num_full] = match.pages
        self._free(double)
        return match

    def flush(self) -> None:
        """Remove every cached prefix that no running request uses."""
        self._free(self.tree.evict(self.tree.num_pages))
        if self.tree.events is not None and not self.tree.num_pages:
            self.tree.events.cleared()
        if self.states is not None:
            self.states.collect()
        self.tiers.clear()

    def publish_events(self) -> None:
        """Publish which pages entered or left the prefix cache since the last call, if enabled."""
        if self.tree.events is not None:
            self.tree.events.flush()

    def recover(self, block_tables: list[BlockTable]) -> None:
        """Free every page and undo every lock that belongs to none of `block_tables`.

        This is called after an exception, which may have left pages that belong to no request.
        Cached pages stay. Every page is checked, which takes milliseconds.
        """
        if self.states is not None:
            # This comes before `lock_only`, which lists the leaves that may be evicted. A leaf
            # with a pinned snapshot is not one of them.
            holds = [table.state_hold for table in block_tables if table.state_hold >= 0]
            self.states.recover(holds)
        self.tree.lock_only(
            [block_table.node for block_table in block_tables if block_table.node is not None]
        )
        own = [block_table.own() for block_table in block_tables]
        taken = np.concatenate([self.tree.all_pages(), *own])
        self.pool.reset(taken)
        if self.windows is not None:
            self.windows.recover(block_tables, taken)
        self.tiers.recover()

    def check_invariants(self, block_tables: list[BlockTable]) -> None:
        """Assert that every page, and every slot of recurrent states, is in exactly one place.

        Raises:
            AssertionError: a page or a slot is lost or is in two places.
        """
        own = [block_table.own() for block_table in block_tables]
        everything = np.concatenate([self.pool.free_pages(), self.tree.all_pages(), *own])
        num_pages = self.pool.num_pages
        exists = (everything > 0) & (everything <= num_pages)
        is_known = np.zeros(num_pages + 1, dtype=bool)
        is_known[everything[exists]] = True
        is_whole = len(everything) == num_pages and exists.all() and is_known[1:].all()
        assert is_whole, "pages were lost or doubled"
        if not block_tables:
            assert self.tree.num_locked_pages == 0, "the tree is locked though nothing runs"
        if self.states is not None:
            self.states.check_invariants(len(block_tables))
        if self.windows is not None:
            self.windows.check_invariants(block_tables, self.pool.free_pages())
        self.tiers.check_invariants()
