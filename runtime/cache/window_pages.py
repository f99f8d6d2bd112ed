"""Manages the pages of sliding-window layers, if full-attention layers have pages of their own.

Sliding-window layers then have a smaller pool of their own. A page of the other layers is called a
full page. A page of the smaller pool, a window page, has the keys and values of the same tokens as
one full page. `page_of` maps full pages to window pages. So block tables and the prefix tree
contain only full pages. A request can resume after a cached prefix if all full pages within the
window before that point have window pages.

A running request uses the window pages within its current window. Other window pages are cached:
each stays with its full page until there are too few window pages.

Source: the mapping from full to windowed slots is SGLang's (`SWATokenToKVPoolAllocator`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from runtime.cache.block_table import BlockTable
from runtime.cache.page_pool import PagePool, Pages
from runtime.step.step_plan import Int32Array, Int64Array, WindowUpdate


def pages_of_request(window: int, page_size: int) -> int:
    """Return the most window pages that a decoding request uses at a time."""
    return -(-window // page_size) + 2


class WindowPages:
    """Assigns window pages to full pages, and frees those that the windows have moved past.

    Attributes:
        pool: the free window pages.
        page_of: `[num_full_pages + 1]` int32, the window page of each full page; 0 for none.
    """

    def __init__(
        self, num_pages: int, num_full_pages: int, *, page_size: int, window: int, step_tokens: int
    ) -> None:
        """Manage `num_pages` window pages, all free at first.

        Args:
            num_pages: number of window pages.
            num_full_pages: number of full pages.
            page_size: number of tokens per page, of both kinds.
            window: most keys that a query of a sliding-window layer attends to, with its own.
            step_tokens: most prompt tokens of a step.
        """
        self.pool = PagePool(num_pages)
        self.page_of: Int32Array = np.zeros(num_full_pages + 1, dtype=np.int32)
        self._window, self._page_size = window, page_size
        self._per_request = pages_of_request(window, page_size)
        self._of_step = -(-step_tokens // page_size)
        # For each full page, the number of running requests that use its window page.
        self._num_users: Int32Array = np.zeros(num_full_pages + 1, dtype=np.int32)
        # Full pages whose window page no request uses, the longest unused first. `_resumable` has
        # those within a window before a point where other requests are likely to resume; `_behind`
        # has the others, which are evicted first.
        self._behind: dict[int, None] = {}
        self._resumable: dict[int, None] = {}
        self._changed: list[Pages] = []
        # Requests that had a prompt chunk in the latest step, with their number of tokens after it.
        self._chunks: dict[BlockTable, int] = {}
        self._num_holds = 0

    @property
    def admits(self) -> bool:
        """Whether there are window pages for one more request, in every later step.

        The answer assumes that the other running requests use as many as they may.
        """
        needed = (self._num_holds + 1) * self._per_request + self._of_step
        return needed <= self.pool.num_pages

    def count_resumable(self, pages: Pages) -> int:
        """Return the largest number of first pages in `pages` after which a request can resume.

        `pages` are the full pages of a cached prefix, in order.
        """
        counts = np.arange(1, len(pages) + 1, dtype=np.int64)
        # For each number of first pages, the index of its last page without a window page.
        missing = np.where(self.page_of[pages] > 0, -1, counts - 1)
        found = np.flatnonzero(
            np.maximum.accumulate(missing) < self._first_seen(counts * self._page_size)
        )
        return int(found[-1]) + 1 if len(found) else 0

    def _first_seen(self, num_tokens: Int64Array) -> Int64Array:
        """Return the index of the first page that a query at position `num_tokens` attends to."""
        first: Int64Array = np.maximum(num_tokens - self._window + 1, 0) // self._page_size
        return first

    def _first_of(self, num_tokens: int) -> int:
        return int(self._first_seen(np.array(num_tokens, dtype=np.int64)))

    def begin(self, block_table: BlockTable, num_tokens: int) -> None:
        """Let a new request use the window pages to which its first computed token attends.

        Args:
            block_table: block table with the cached prefix, after which the request can resume.
            num_tokens: number of known tokens of the request.
        """
        self._num_holds += 1
        block_table.has_window = True
        num_cached, size = block_table.num_shared, self._page_size
        block_table.branch_points |= {num_cached * size, (num_tokens - 1) // size * size}
        first = self._first_of(num_cached * size)
        pages = block_table.pages[first:num_cached]
        self._num_users[pages] += 1
        self._forget(pages.tolist())
        block_table.window_first, block_table.window_end = first, num_cached

    def advance(self, block_table: BlockTable, start: int, end: int) -> int:
        """Assign window pages to the tokens of a step.

        Pages of earlier tokens to which no query attends any more become unused.

        Args:
            block_table: block table that has full pages for these tokens.
            start: number of tokens that are computed before the step.
            end: number of tokens after the step.

        Returns:
            Number of tokens up to the end of the request's last window page.
        """
        self._leave(block_table, start)
        if end > start + 1:
            self._chunks[block_table] = end
        last = -(-end // self._page_size)
        if last > block_table.window_end:
            self._give(block_table.pages[block_table.window_end : last])
            block_table.window_end = last
        return block_table.window_end * self._page_size

    def leave_chunks(self) -> None:
        """Release window pages that only the prompt chunks of the latest step needed.

        Call this before each step.
        """
        for block_table, end in self._chunks.items():
            self._leave(block_table, end)
        self._chunks.clear()

    def _give(self, pages: Pages) -> None:
        assert not self.page_of[pages].any(), "a full page has one window page"
        self._evict(len(pages) - self.pool.num_free)
        self.page_of[pages] = self.pool.take(len(pages))
        self._num_users[pages] = 1
        self._changed.append(pages.copy())

    def _evict(self, shortage: int) -> None:
        """Free `shortage` window pages that no request uses."""
        victims: list[int] = []
        while len(victims) < shortage:
            oldest = self._behind or self._resumable
            page = next(iter(oldest))
            del oldest[page]
            victims.append(page)
        if victims:
            self._take_back(np.array(victims, dtype=np.int32))

    def _take_back(self, pages: Pages) -> None:
        self.pool.give_back(self.page_of[pages])
        self.page_of[pages] = 0
        self._changed.append(pages)

    def _leave(self, block_table: BlockTable, num_computed: int) -> None:
        """Release the window pages that no query after `num_computed` tokens reads."""
        begin = block_table.window_first
        first = self._first_of(num_computed)
        if first <= begin:
            return
        pages = block_table.pages[begin:first]
        self._num_users[pages] -= 1
        is_near = np.zeros(len(pages), dtype=bool)
        for point in block_table.branch_points:
            end = point // self._page_size
            seen = self._first_of(point)
            is_near[max(seen - begin, 0) : max(end - begin, 0)] = True
        self._note_unused(pages, is_near)
        block_table.window_first = first

    def _note_unused(self, pages: Pages, is_near: np.ndarray) -> None:
        for page, is_kept in zip(pages.tolist(), is_near.tolist(), strict=True):
            if not self._num_users[page]:
                (self._resumable if is_kept else self._behind)[page] = None

    def end(self, block_table: BlockTable) -> None:
        """Release all window pages of a request that ends; cached pages keep their window pages."""
        if not block_table.has_window:
            return
        self._num_holds -= 1
        self._chunks.pop(block_table, None)
        pages = block_table.pages[block_table.window_first : block_table.window_end]
        self._num_users[pages] -= 1
        self._note_unused(pages, np.ones(len(pages), dtype=bool))
        block_table.has_window = False
        block_table.window_first = block_table.window_end = 0

    def replace(self, ours: Pages, theirs: Pages) -> None:
        """Move window pages from a request's full pages to equal full pages of the prefix tree.

        Args:
            ours: full pages that the request gives up.
            theirs: the tree's pages of the same tokens.
        """
        for our, their in zip(ours.tolist(), theirs.tolist(), strict=True):
            window_page = self.page_of[our]
            if not window_page:
                continue
            num_users = self._num_users[our]
            if self.page_of[their]:
                if num_users:
                    self._num_users[their] += num_users
                    self._num_users[our] = 0
                    self._forget([their])
                    self._behind[our] = None
                continue
            self.page_of[their], self.page_of[our] = window_page, 0
            self._num_users[their], self._num_users[our] = num_users, 0
            for unused in (self._behind, self._resumable):
                if our in unused:
                    del unused[our]
                    unused[their] = None
            self._changed.append(np.array([our, their], dtype=np.int32))

    def drop(self, pages: Pages) -> None:
        """Free the window pages of full pages that are freed."""
        held = pages[self.page_of[pages] > 0]
        if len(held):
            assert not self._num_users[held].any(), "a request uses the window page"
            self._forget(held.tolist())
            self._take_back(held)

    def _forget(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._behind.pop(page, None)
            self._resumable.pop(page, None)

    def take_update(self) -> WindowUpdate | None:
        """Return the entries of `page_of` that changed since the last call; `None` if none did."""
        if not self._changed:
            return None
        pages = np.unique(np.concatenate(self._changed))
        self._changed.clear()
        return WindowUpdate(pages, self.page_of[pages])

    def recover(self, block_tables: list[BlockTable], taken: Pages) -> None:
        """Free every window page that does not belong to a full page in use.

        Args:
            block_tables: block tables of all requests that continue.
            taken: full pages of these requests and of the prefix tree.
        """
        has_owner = np.zeros(len(self.page_of), dtype=bool)
        has_owner[taken] = True
        self._num_users[:] = 0
        for table in block_tables:
            # These pages were meant for a step that was never planned.
            has_owner[table.pages[max(table.window_end, table.num_shared) : table.num_pages]] = (
                False
            )
            self._num_users[table.pages[table.window_first : table.window_end]] += 1
        self.page_of[~has_owner] = 0
        unused = (self.page_of > 0) & (self._num_users == 0)
        for kind in (self._behind, self._resumable):
            for page in [page for page in kind if not unused[page]]:
                del kind[page]
        for page in np.flatnonzero(unused).tolist():
            if page not in self._resumable:
                self._behind.setdefault(page)
        self.pool.reset(self.page_of[self.page_of > 0])
        self._chunks = {table: end for table, end in self._chunks.items() if table in block_tables}
        self._num_holds = sum(table.has_window for table in block_tables)
        self._changed = [np.arange(1, len(self.page_of), dtype=np.int32)]

    def check_invariants(self, block_tables: list[BlockTable], free_pages: Pages) -> None:
        """Assert that every window page is in one place, and that each window is complete.

        Args:
            block_tables: block tables of all running requests.
            free_pages: full pages that are free.

        Raises:
            AssertionError: a window page is lost, is in two places, or is missing.
        """
        held = self.page_of[self.page_of > 0]
        everything = np.sort(np.concatenate([self.pool.free_pages(), held]))
        is_whole = np.array_equal(everything, np.arange(1, self.pool.num_pages + 1))
        assert is_whole, "window pages were lost or doubled"
        assert not self.page_of[free_pages].any(), "a free page has a window page"
        users = np.zeros_like(self._num_users)
        for table in block_tables:
            used = table.pages[table.window_first : table.window_end]
            assert self.page_of[used].all(), "a window lost a page"
            users[used] += 1
        assert np.array_equal(users, self._num_users), "uses of window pages are miscounted"
        unused = np.flatnonzero((self.page_of > 0) & (users == 0)).tolist()
        assert sorted([*self._behind, *self._resumable]) == unused, "unused pages are miscounted"
        assert self._num_holds == len(block_tables), "a request with a window was lost"
