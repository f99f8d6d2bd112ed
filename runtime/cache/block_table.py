"""The pages of one request."""

from __future__ import annotations

import numpy as np

from runtime.cache.page_pool import EMPTY_PAGES, Pages
from runtime.cache.radix_tree import RadixNode


class BlockTable:
    """The pages of one request, in the order of its tokens.

    Attributes:
        pages: `[>= num_pages]` int32, page numbers; entries from `num_pages` on are unused.
        num_pages: number of pages.
        num_shared: number of first pages that belong to the prefix tree.
        num_dropped: number of first pages that were freed; their entries are 0.
        node: the tree's node at which the shared pages end, locked; `None` if none are shared.
        version: changes when an entry of `pages` changes, so that its copies on the device are
            renewed. Appending entries does not change it. Freeing pages behind a window does not
            either, because their entries are never read again.
        state_hold: the request's handle for recurrent states in the `StatePool`; -1 for none.
        branch_points: token counts, multiples of the page size, at which sequences with the same
            beginning diverge from this one.
        has_window: whether the request uses window pages, which `WindowPages` manages.
        window_first, window_end: range of indices in `pages`. The request uses the window pages of
            the pages in this range.
        load_ticket: ticket of the copies that bring pages of this request back from host memory
            (see `HostTier`), until a step that waits for them is planned; 0 for none.
        resume_pages: number of pages after which the request resumes from recurrent states that are
            copied back from host memory; 0 if it does not.
        state_ticket: like `load_ticket`, for these states.
    """

    __slots__ = (
        *("branch_points", "has_window", "node", "num_dropped", "num_pages", "num_shared"),
        *("load_ticket", "num_loaded", "pages", "resume_pages", "state_hold", "state_ticket"),
        *("version", "window_end", "window_first"),
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
        self.has_window = False
        self.window_first = self.window_end = 0
        self.num_loaded = self.load_ticket = 0
        self.resume_pages = self.state_ticket = 0

    def held(self) -> Pages:
        """Return the page numbers of all pages, as a view."""
        return self.pages[: self.num_pages]

    def own(self) -> Pages:
        """Return the pages that belong to this request alone, as a view."""
        return self.pages[max(self.num_shared, self.num_dropped) : self.num_pages]

    def append(self, pages: Pages) -> None:
        """Append pages."""
        needed = self.num_pages + len(pages)
        self._make_room(needed)
        self.pages[self.num_pages : needed] = pages
        self.num_pages = needed

    def append_one(self, page: int) -> None:
        """Append one page."""
        self._make_room(self.num_pages + 1)
        self.pages[self.num_pages] = page
        self.num_pages += 1

    def _make_room(self, needed: int) -> None:
        """Grow the array to at least `needed` entries, by doubling."""
        if needed > len(self.pages):
            grown = np.zeros(max(needed, 2 * len(self.pages), 8), dtype=np.int32)
            grown[: self.num_pages] = self.held()
            self.pages = grown
