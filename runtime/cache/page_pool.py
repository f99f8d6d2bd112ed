"""Free pages of the KV pool, as a stack of int32 numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]
EMPTY_PAGES: Pages = np.empty(0, dtype=np.int32)


class PagePool:
    """Hands out page numbers 1 to `num_pages`; page 0 is reserved for padding."""

    def __init__(self, num_pages: int) -> None:
        """Start with all `num_pages` pages free."""
        self.num_pages = num_pages
        # Highest numbers at the bottom, so that pages are handed out in ascending order.
        self._stack: Pages = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return self._num_free

    def take(self, count: int) -> Pages:
        """Remove and return `count` free pages; the caller has made sure they exist."""
        assert 0 <= count <= self._num_free, "the pool has too few free pages"
        end = self._num_free
        self._num_free = end - count
        return self._stack[end - count : end][::-1].copy()

    def give_back(self, pages: Pages) -> None:
        """Return pages taken before."""
        count = len(pages)
        assert self._num_free + count <= self.num_pages, "a page was given back twice"
        self._stack[self._num_free : self._num_free + count] = pages[::-1]
        self._num_free += count

    def reset(self, taken: Pages) -> None:
        """Make all pages free except `taken`."""
        is_free = np.ones(self.num_pages + 1, dtype=bool)
        is_free[0] = False
        is_free[taken] = False
        free = np.flatnonzero(is_free)
        self._num_free = len(free)
        self._stack[: len(free)] = free[::-1]

    def free_pages(self) -> Pages:
        """The free page numbers, for the invariant check."""
        return self._stack[: self._num_free].copy()
