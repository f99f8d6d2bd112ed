"""The only writer of pages and prefix tree.

Every page is in exactly one place: free in the pool, cached in the tree, or held by one request:

    block_table.pages:  [ shared with the tree (locked by block_table.node) | owned by the request ]
                          0 ...................................... num_shared ........ num_pages

If no query sees all keys, pages behind every window are freed, from the front on. Then the request
no longer shares pages with the tree:

    block_table.pages:  [ 0, 0, ... 0 | owned by the request ]
                          num_dropped .......... num_pages
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from runtime.cache.page_pool import EMPTY_PAGES, PagePool, Pages
from runtime.cache.radix_tree import CommonPrefix, PrefixMatch, RadixNode, RadixTree, Tokens
from runtime.cache.state_pool import StatePool
from runtime.ipc.time_messages import PrefixBreak


class BlockTable:
    """The pages of one request.

    Attributes:
        pages: `[num_pages]` int32, in sequence order.
        num_shared: the first `num_shared` belong to the tree.
        num_dropped: the first `num_dropped` were freed: their numbers are 0.
        node: the tree's node at which the shared part ends, locked; `None` when nothing is shared.
        version: grows when an entry of `pages` other than at the end changes, so that device copies
            are renewed. Dropped pages do not count: no kernel reads entries behind a window.
        state_hold: the request's hold in the `StatePool`, -1 for none.
        branch_points: ends of pages, in tokens, after which other sequences differ from this one.
    """

    __slots__ = (
        *("branch_points", "node", "num_dropped", "num_pages", "num_shared", "pages"),
        *("state_hold", "version"),
    )

    def __init__(self) -> None:
        self.pages: Pages = EMPTY_PAGES
        self.num_pages = 0
        self.num_shared = 0
        self.num_dropped = 0
        self.node: RadixNode | None = None
        self.version = 0
        self.state_hold = -1
        self.branch_points: set[int] = set()

    def held(self) -> Pages:
        """The page numbers in order."""
        return self.pages[: self.num_pages]

    def own(self) -> Pages:
        """The pages that belong to this request alone."""
        return self.pages[max(self.num_shared, self.num_dropped) : self.num_pages]

    def append(self, pages: Pages) -> None:
        """Add pages at the end."""
        needed = self.num_pages + len(pages)
        self._make_room(needed)
        self.pages[self.num_pages : needed] = pages
        self.num_pages = needed

    def append_one(self, page: int) -> None:
        """Add a page at the end."""
        self._make_room(self.num_pages + 1)
        self.pages[self.num_pages] = page
        self.num_pages += 1

    def _make_room(self, needed: int) -> None:
        """Grow the array by doubling."""
        if needed > len(self.pages):
            grown = np.zeros(max(needed, 2 * len(self.pages), 8), dtype=np.int32)
            grown[: self.num_pages] = self.held()
            self.pages = grown


class CacheManager:
    """Matches, allocates, shares and frees pages; evicts cached ones when the pool runs dry.

    Attributes:
        window: most keys that a query sees, its own included; `None` if some layer sees all.
        num_evicted_tokens: tokens evicted from the tree so far.
        states: slots of recurrent states; `None` if the model has none.
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
    ) -> None:
        """Manage `num_pages` pages of `page_size` tokens each.

        A model with recurrent states also has `num_state_slots` slots, for at most `max_running`
        requests at a time.
        """
        self.page_size = page_size
        self.window = window
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_size)
        self.enable_prefix_cache = enable_prefix_cache
        self.num_evicted_tokens = 0
        self.states: StatePool | None = None
        if num_state_slots:
            self.states = StatePool(num_state_slots, page_size, max_running, self.tree)

    @property
    def lacks_states(self) -> bool:
        """Whether no further request can have slots of recurrent states."""
        return self.states is not None and not self.states.admits

    @property
    def num_available_pages(self) -> int:
        """Pages that are free or could be evicted."""
        return self.pool.num_free + self.tree.num_pages - self.tree.num_locked_pages

    @property
    def num_held_pages(self) -> int:
        """Number of pages that running requests need: their own and the shared ones they lock."""
        return self.pool.num_pages - self.num_available_pages

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that `num_tokens` tokens fill or begin."""
        return -(-num_tokens // self.page_size)

    def match_length(self, tokens: Tokens, namespace: str) -> int:
        """Return the length of the longest cached prefix, by which policies order requests."""
        if not self.enable_prefix_cache:
            return 0
        if self.states is not None:
            return self.tree.count_resumable(tokens, namespace) * self.page_size
        return self.tree.count_pages(tokens, namespace) * self.page_size

    def common_prefix(self, tokens: Tokens, namespace: str) -> CommonPrefix:
        """Return the common prefix with the cache; see `RadixTree.common_prefix`."""
        return self.tree.common_prefix(tokens, namespace)

    def prefix_break(
        self, block_table: BlockTable, tokens: Tokens
    ) -> tuple[PrefixBreak | None, bool]:
        """Return where a prompt leaves the cache, right after `allocate`.

        Args:
            block_table: the request's block table.
            tokens: the tree's keys of the whole prompt.

        Returns:
            The place, `None` if all of it is cached or nothing is ever cached; and whether the
            request's namespace is empty.
        """
        node = block_table.node
        if node is None:
            return None, False
        num_cached = block_table.num_shared * self.page_size
        common = self.tree.common_after(node, tokens[num_cached:])
        is_empty = node.parent is None and not node.children
        index = num_cached + common.num_tokens
        return (PrefixBreak(index, common.differs) if index < len(tokens) else None), is_empty

    def attach_prefix(self, block_table: BlockTable, tokens: Tokens, namespace: str) -> int:
        """Give an empty `block_table` the longest cached prefix of `tokens`, and lock it.

        The prefix leaves out at least the last token: its logits must be computed.

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
            if num_pages < len(match.pages):
                # Others have the pages that follow, so more such requests are likely.
                block_table.branch_points.add(len(match.pages) * self.page_size)
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
            block_table.state_hold = self.states.begin(node, num_tokens)

    def snapshot_points(
        self, block_table: BlockTable, start: int, length: int, num_known: int
    ) -> Sequence[int]:
        """Return where a chunk of a prompt leaves snapshots: ends of pages, in tokens.

        The points are the ends of pages after which other sequences differ from this one, the
        prompt's last end of a page, and the chunk's last end of a page.

        Args:
            block_table: a block table of a model with recurrent states.
            start: number of tokens before the chunk.
            length: number of tokens in the chunk.
            num_known: number of the sequence's tokens that are known.
        """
        if not self.enable_prefix_cache:
            return ()
        end = start + length
        # The last token is computed anyway, so an equal prompt resumes before it.
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
        """Give a new request the longest cached prefix and pages for all of its tokens.

        Args:
            block_table: the request's block table, which is empty.
            prefix: the tree's keys of the tokens that may come from the cache.
            namespace: prefixes are shared only inside the same namespace.
            num_tokens: number of tokens that need pages.
            num_reserved: pages that must stay available for running requests.
            free_more: called once if pages are missing; the function may free some pages.

        Returns:
            Number of tokens from the cache; `None`, with nothing changed, if pages are missing.
        """
        if self.lacks_states:
            return None
        num_cached = self.attach_prefix(block_table, prefix, namespace)
        # One more than the tokens: the first generated token needs a slot.
        needed = self.pages_for(num_tokens + 1) - block_table.num_pages + num_reserved
        if needed > self.num_available_pages:
            free_more()
        if needed > self.num_available_pages and num_reserved:
            self.release(block_table, prefix[:0], namespace)
            return None
        extended = self.extend(block_table, num_tokens)
        assert extended, "pages were counted before"
        return num_cached

    def extend(self, block_table: BlockTable, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all.

        Return false, with nothing changed, if pages are short.
        """
        missing = self.pages_for(num_tokens) - block_table.num_pages
        if missing <= 0:
            return True
        if not self._make_free(missing):
            return False
        block_table.append(self.pool.take(missing))
        return True

    def extend_each(self, block_tables: list[BlockTable]) -> Pages | None:
        """Give each of `block_tables` one more page, or change nothing if there are too few.

        Returns:
            `[num_block_tables]`, the new pages.
        """
        if not self._make_free(len(block_tables)):
            return None
        pages = self.pool.take(len(block_tables))
        for block_table, page in zip(block_tables, pages.tolist(), strict=True):
            block_table.append_one(page)
        return pages

    def _make_free(self, count: int) -> bool:
        """Evict until `count` pages are free.

        Return false, with nothing changed, if that is impossible.
        """
        if count > self.num_available_pages:
            return False
        shortage = count - self.pool.num_free
        if shortage > 0:
            evicted = self.tree.evict(shortage)
            self.num_evicted_tokens += len(evicted) * self.page_size
            self.pool.give_back(evicted)
        return True

    def share(self, block_table: BlockTable, tokens: Tokens, namespace: str) -> None:
        """Let other requests find the computed pages of `tokens`; the request goes on."""
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
        block_table.pages[:num_full] = match.pages
        block_table.num_shared = num_full
        block_table.node = match.node
        block_table.version += 1

    def drop_behind(self, block_table: BlockTable, first_seen: int) -> int:
        """Free the pages that lie wholly before token `first_seen`, which no later query sees.

        Pages shared with the tree are released together, once all of them lie before that token;
        until then no page is freed. Shared pages are unlocked, and the tree keeps them cached.

        Returns:
            Number of pages that must lie before `first_seen` so that another call can free more.
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
        """Free the pages of `block_table`.

        The tree keeps the full pages of `tokens`, all of which are computed.
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
        self.pool.give_back(block_table.held()[max(num_kept, block_table.num_dropped) :])
        if block_table.node is not None:
            self.tree.unlock(block_table.node)
        block_table.pages, block_table.node = EMPTY_PAGES, None
        block_table.num_pages = block_table.num_shared = block_table.num_dropped = 0
        block_table.version += 1

    def distrust(self, block_table: BlockTable, namespace: str) -> None:
        """Free the pages of `block_table`, whose numbers may be wrong.

        With recurrent states, the tree holds a prompt's earlier chunks before the last chunk is
        checked. So the path of this prompt loses its snapshots, and the pages that nothing else
        uses.
        """
        node = block_table.node
        self.release(block_table, np.empty(0, dtype=np.int32), namespace)
        if node is not None and self.states is not None:
            self.pool.give_back(self.tree.discard(node))
            self.states.collect()

    def _insert(
        self, block_table: BlockTable, tokens: Tokens, num_full: int, namespace: str
    ) -> PrefixMatch:
        known = tokens[: num_full * self.page_size]
        match = self.tree.insert(known, block_table.held()[:num_full], namespace)
        # Another request computed part of the same prefix first: its pages stay, ours are freed.
        ours = block_table.held()[block_table.num_shared : num_full]
        theirs = match.pages[block_table.num_shared :]
        self.pool.give_back(ours[ours != theirs])
        return match

    def flush(self) -> None:
        """Drop every cached prefix that no request holds."""
        self.pool.give_back(self.tree.evict(self.tree.num_pages))
        if self.tree.events is not None and not self.tree.num_pages:
            self.tree.events.cleared()
        if self.states is not None:
            self.states.collect()

    def publish_events(self) -> None:
        """Publish which pages the tree gained and lost since the last call, if events are on."""
        if self.tree.events is not None:
            self.tree.events.flush()

    def recover(self, block_tables: list[BlockTable]) -> None:
        """Free every page and undo every lock that belongs to none of `block_tables`.

        The tree's pages stay. Call this after an exception: it frees the pages that were taken for
        a request that is not in `block_tables`. It checks every page, so it takes milliseconds.
        """
        if self.states is not None:
            # This comes first: `lock_only` lists the leaves that may be evicted, and none that is
            # pinned.
            holds = [table.state_hold for table in block_tables if table.state_hold >= 0]
            self.states.recover(holds)
        self.tree.lock_only(
            [block_table.node for block_table in block_tables if block_table.node is not None]
        )
        own = [block_table.own() for block_table in block_tables]
        self.pool.reset(np.concatenate([self.tree.all_pages(), *own]))

    def check_invariants(self, block_tables: list[BlockTable]) -> None:
        """Assert that every page, and every slot of states, is in exactly one place.

        Raises:
            AssertionError: a page or a slot is lost or owned twice.
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
